"""Who holds which tensors: nothing is copied that is going to be replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import backquant
from backquant.convert import convert_to_reference
from backquant.pipeline.lower import quantized_model
from backquant.qconfig import get_default_qconfig_mapping

WIDTH = 512


class Net(nn.Module):
    """Weights of one kind that folding copies, and of two that nothing has to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, 1)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.other = nn.Conv2d(WIDTH, WIDTH, 1)
        self.layer_norm = nn.LayerNorm(WIDTH)
        self.fc = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.other(self.norm(self.conv(x)).relu()).mean([2, 3])
        x = self.layer_norm(x)
        for fc in self.fc:
            x = fc(x).relu()
        return x


WEIGHTS = 6 * WIDTH * WIDTH  # of all that is quantized


def batch() -> torch.Tensor:
    return torch.randn(2, WIDTH, 2, 2)


def storages(module: nn.Module) -> set[int]:
    tensors = [*module.parameters(), *module.buffers()]
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel() >= WIDTH}


class Living(TorchDispatchMode):
    """Bytes of the tensors that were made while it is on and are there at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: kept for key, kept in self.alive.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def test_a_prepared_model_holds_the_models_own_weights() -> None:
    model = Net().eval()
    prepared = backquant.prepare_fx(
        model,
        get_default_qconfig_mapping("x86"),
        batch(),
        backend_config=backquant.backend_config.get_x86_backend_config(),
    )
    mine, theirs = storages(model), storages(prepared)
    shared = [model.other, model.layer_norm, *model.fc]
    assert {p.untyped_storage().data_ptr() for m in shared for p in m.parameters()} <= theirs
    folded = sum(p.numel() >= WIDTH for p in model.conv.parameters())
    assert len({*theirs} - mine) == folded


def test_kernels_hold_the_integers_of_the_reference_model() -> None:
    model = Net().eval()
    prepared = backquant.prepare_fx(
        model,
        get_default_qconfig_mapping("x86"),
        batch(),
        backend_config=backquant.backend_config.get_x86_backend_config(),
    )
    prepared(batch())
    reference = convert_to_reference(prepared)
    quantized = quantized_model(reference, model)
    integers = {
        t.untyped_storage().data_ptr() for t in reference.buffers() if t.dtype == torch.int8
    }
    kept = {t.untyped_storage().data_ptr() for t in quantized.buffers() if t.dtype == torch.int8}
    assert integers == kept and len(kept) == 6


def test_a_quantized_model_holds_no_float_weights() -> None:
    quantized = backquant.quantize(Net().eval(), backend="x86", calibration=[batch()])
    tensors = [*quantized.parameters(), *quantized.buffers()]
    assert all(t.dim() <= 1 for t in tensors if t.is_floating_point())
    assert sum(t.nbytes for t in tensors) < 1.1 * WEIGHTS


def test_what_quantizing_adds_at_its_peak() -> None:
    """The folded weight, the integers, one float copy of a weight under way; and small change."""
    model, data = Net().eval(), batch()
    with Living() as living:
        quantized = backquant.quantize(model, backend="x86", calibration=[data])
    one = 4 * WIDTH * WIDTH
    assert WEIGHTS < living.peak < one + WEIGHTS + 1.5 * one
    assert quantized.report.coverage == 1.0


def test_nothing_that_was_made_on_the_way_stays() -> None:
    model, data = Net().eval(), batch()
    with Living() as living:
        quantized = backquant.quantize(model, backend="x86", calibration=[data])
    kept = {t.untyped_storage()._cdata for t in [*quantized.parameters(), *quantized.buffers()]}
    import gc

    gc.collect()
    left = {
        size
        for key, (storage, size) in living.alive.items()
        if key not in kept and not storage.expired()
    }
    assert max(left, default=0) < WIDTH * WIDTH
