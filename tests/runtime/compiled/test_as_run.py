"""Kernels that compiled code calls as they run: one operator, whose shapes are known beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant import QConfigMapping, default_dynamic_qconfig, quantize
from backquant.errors import EngineError
from backquant.lower.kernels.configured import KernelModule
from backquant.qconfig import float_qparams_weight_only_qconfig
from backquant.runtime.compiled.as_run import AsItRuns, calls_as_they_run
from backquant.runtime.compiled.modules import compilable


class Within(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, other: Any = None) -> Any:
        return self.layer(x, other)


class Rows(Within):
    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


ROWS = torch.tensor([[3, 1, 4], [0, 2, 2]])
STEPS = torch.linspace(-1, 1, 2 * 5 * 6).reshape(2, 5, 6)
STATE = torch.linspace(-1, 1, 2 * 4).reshape(2, 4)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    "lstm": (lambda: nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True), (STEPS,)),
    "gru with a state": (lambda: nn.GRU(6, 4), (STEPS, torch.ones(1, 5, 4))),
    "one sequence": (lambda: nn.LSTM(6, 4), (STEPS[0],)),
    "lstm cell": (lambda: nn.LSTMCell(6, 4), (STEPS[:, 0], (STATE, STATE))),
    "gru cell": (lambda: nn.GRUCell(6, 4), (STEPS[:, 0], STATE)),
    "rnn cell of one": (lambda: nn.RNNCell(6, 4), (STEPS[0, 0],)),
    "table": (lambda: Rows(nn.Embedding(5, 4)), (ROWS,)),
    "bags": (lambda: Rows(nn.EmbeddingBag(5, 4)), (ROWS,)),
    "bags by offsets": (
        lambda: Within(nn.EmbeddingBag(5, 4, mode="sum", include_last_offset=True)),
        (ROWS.reshape(-1), torch.tensor([0, 2, 6])),
    ),
}


def lowered(name: str) -> tuple[backquant.QuantizedModel, tuple[Any, ...]]:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    rows = float_qparams_weight_only_qconfig
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    mapping = mapping.set_object_type(nn.Embedding, rows).set_object_type(nn.EmbeddingBag, rows)
    model = quantize(make().eval(), inputs, backend="x86", qconfig_mapping=mapping, slower="keep")
    return model, inputs


@pytest.mark.parametrize("name", MODELS)
def test_exported_it_gives_what_the_kernel_gives(name: str) -> None:
    quantized, inputs = lowered(name)
    made = compilable(quantized.graph_module)
    exported = torch.export.export(made, inputs, strict=False)
    [(kernel, count)] = calls_as_they_run(exported.graph).items()
    assert (kernel, count) == (quantized.kernels[0].kernel, 1)
    [call] = exported.graph.find_nodes(
        op="call_function", target=torch.ops.backquant.as_it_runs.default
    )
    found = torch.ops.backquant.as_it_runs([*torch.utils._pytree.tree_leaves(inputs)], call.args[1])
    known = call.meta["val"]
    assert [value.shape for value in found] == [value.shape for value in known]
    assert [value.stride() for value in found] == [value.stride() for value in known]
    torch.testing.assert_close(exported.module()(*inputs), quantized(*inputs), rtol=0, atol=0)


def test_packed_sequences_are_refused() -> None:
    quantized, _ = lowered("lstm")
    [kernel] = [m for m in quantized.graph_module.modules() if isinstance(m, KernelModule)]
    with pytest.raises(EngineError, match="not for PackedSequence"):
        AsItRuns(kernel)(nn.utils.rnn.pack_sequence([STEPS[0]]))
