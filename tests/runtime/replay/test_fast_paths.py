"""Attention and transformer layers that compute all as one operator: recorded as they are run."""

from __future__ import annotations

import threading

import torch
from torch import nn

import backquant
from backquant.api import convert_fx, prepare_fx
from backquant.runtime.replay.record import Recording, as_without_modes, known_constants, record

LEAVES = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(32, 2, batch_first=True)
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layer(x, x, x, need_weights=False)[0])
        return found


@torch.no_grad()
def test_each_call_gives_the_same_bits(tmp_path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    for model in (nn.Sequential(layer, nn.Linear(32, 8)), Attention()):
        x = torch.randn(2, 9, 32)
        backend = backquant.get_backend_config("fbgemm")
        mapping = backquant.default_mapping(backend)
        prepared = prepare_fx(model.eval(), mapping, (x,), backend_config=backend)
        prepared(x)
        made = convert_fx(prepared)
        assert any(isinstance(part, LEAVES) for part in made.graph_module.modules())
        backquant.save(made, tmp_path / "model.bq")
        loaded = backquant.load(tmp_path / "model.bq")
        calls = [made(x) for _ in range(3)] + [loaded(x) for _ in range(3)]
        assert all(torch.equal(call, calls[0]) for call in calls[1:])


@torch.no_grad()
def test_what_runs_is_what_is_recorded() -> None:
    x = torch.randn(2, 9, 32)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    for model, name in (
        (Attention(), "aten._native_multi_head_attention.default"),
        (layer, "aten._transformer_encoder_layer_fwd.default"),
    ):
        _, recording = record(model.eval(), (x,), {}, lambda m=model: known_constants(m))
        assert isinstance(recording, Recording)
        assert name in {str(call.operator) for call in recording.calls}


def test_other_threads_see_their_modes() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    found = []

    def other() -> None:
        with Mode():
            found.append(torch.overrides.has_torch_function((torch.ones(1),)))

    before = torch.overrides.has_torch_function
    with as_without_modes():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert found == [True]
    assert torch.overrides.has_torch_function is before
