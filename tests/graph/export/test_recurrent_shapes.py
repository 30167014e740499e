"""Recurrent layers in an export: one operator, for any length, and not computed step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.graph import Captured
from backquant.graph.export.opaque import recurrent_by_shape
from backquant.graph.export.program import quietly

_LAYERS = [nn.LSTM, nn.GRU, nn.RNN]


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.layer = kind(4, 6, 2, **options)
        self.fc = nn.Linear(
            12 if options.get("bidirectional") else options.get("proj_size") or 6, 3
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        found, state = self.layer(x)
        return self.fc(found), state


@pytest.mark.parametrize("kind", _LAYERS)
@pytest.mark.parametrize("options", [{}, {"batch_first": True, "bidirectional": True}])
def test_the_length_is_free(
    export: Callable[..., Captured], kind: type[nn.RNNBase], options: dict[str, Any]
) -> None:
    model = Tagger(kind, **options)
    captured = export(model, torch.randn(3, 7, 4))
    called = [n.target for n in captured.module.graph.nodes if n.op == "call_module"]
    assert called == ["layer", "fc"]
    x = torch.randn(5, 9, 4)
    torch.testing.assert_close(captured.module(x), model(x))


@pytest.mark.parametrize("kind", _LAYERS)
@pytest.mark.parametrize(
    "options",
    [{"batch_first": True, "bidirectional": True}, {"proj_size": 5}, {"nonlinearity": "relu"}],
)
def test_the_sizes_are_those_of_the_layer(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    if ("proj_size" in options) > (kind is nn.LSTM) or ("nonlinearity" in options) > (
        kind is nn.RNN
    ):
        return
    model, x = Tagger(kind, **options).eval(), torch.randn(3, 7, 4)
    with quietly(), recurrent_by_shape(), torch.no_grad():
        program = torch.export.export(model, (x,), strict=False)
        torch.testing.assert_close(
            program.module()(x), model(x)
        )  # tensors with values are computed
    seen = [n.meta["val"] for n in program.graph.nodes if n.name.startswith("getitem")]
    found, state = model.layer(x)
    wanted = [found, *(state if isinstance(state, tuple) else (state,))]
    assert [t.shape for t in seen] == [t.shape for t in wanted]
    assert [t.stride() for t in seen] == [t.stride() for t in wanted]


def test_kernels_are_put_back() -> None:
    kernels = dict(torch.ops.aten.lstm.input.py_kernels)
    with pytest.raises(ZeroDivisionError), recurrent_by_shape():
        raise ZeroDivisionError
    assert torch.ops.aten.lstm.input.py_kernels == kernels


class Changing(Tagger):
    """The program has to be made functional, and has the length of the example then."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        doubled = x * 2
        view = doubled.transpose(1, 2)
        doubled.add_(1)
        return super().forward(view.transpose(1, 2))


def test_a_length_that_is_fixed_afterwards_is_checked(export: Callable[..., Captured]) -> None:
    model, x = Changing(nn.LSTM).eval(), torch.randn(3, 7, 4)
    result = backquant.quantize(model, x, calibration=[x], capture="export", slower="keep")
    with torch.no_grad():
        assert (result(x)[0] - model(x)[0]).abs().max() < 0.1
        try:
            found = result(torch.randn(3, 9, 4))[0]
        except backquant.BackquantError as error:
            assert "exported for" in str(error)
        else:
            assert found.shape == (3, 9, 3)
