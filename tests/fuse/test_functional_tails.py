"""Functions behind a layer become modules for sequential fusers, and stay functions for others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.backend_config import BackendConfig, BackendPatternConfig, get_backend_config
from backquant.fuse import apply_fusion
from backquant.match import plan_fusion


class Tail(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (F.leaky_relu, "LinearLeakyReLU"),
        (lambda x: F.leaky_relu(x, 0.01, inplace=True), "LinearLeakyReLU"),
        # the pattern lists one argument: a call with another slope does not match it
        (lambda x: F.leaky_relu(x, 0.3), "Linear"),
        (torch.tanh, "LinearTanh"),
        (F.relu, "LinearReLU"),
    ],
    ids=["default slope", "in place", "other slope", "tanh", "relu"],
)
def test_fused_model_computes_the_same(
    function: Callable[[torch.Tensor], torch.Tensor], expected: str
) -> None:
    torch.manual_seed(0)
    model, backend = Tail(function).eval(), get_backend_config("onednn")
    traced = fx.symbolic_trace(model)
    fused = apply_fusion(traced, {}, plan_fusion(traced, backend), backend, is_qat=False).module
    assert type(fused.get_submodule("linear")).__name__ == expected
    x = torch.randn(8, 4)
    assert torch.equal(fused(x), model(x))


def test_other_fusers_get_the_function_itself() -> None:
    got: list[object] = []

    def fuse(is_qat: bool, linear: nn.Module, tail: object) -> nn.Module:
        got.append(tail)
        return nn.Sequential(linear, nn.Tanh())

    entry = BackendPatternConfig((nn.Linear, torch.tanh)).set_fuser_method(fuse)
    backend = BackendConfig("mine").set_backend_pattern_config(entry)
    traced = fx.symbolic_trace(Tail(torch.tanh))
    apply_fusion(traced, {}, plan_fusion(traced, backend), backend, is_qat=False)
    assert got == [torch.tanh]
