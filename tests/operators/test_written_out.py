"""Hard-swish and hard-sigmoid as arithmetic, in a trace and in an export."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import backquant
from backquant.graph import GraphRewriter
from backquant.graph.shapes import GraphValues
from backquant.operators.normal_form import hard_sigmoid, hard_swish

Function = Callable[[torch.Tensor], torch.Tensor]

SWISHES: dict[str, Function] = {
    "timm's": lambda x: x.mul(F.relu6(x + 3.0).div(6.0)),
    "the paper's": lambda x: x * F.relu6(x + 3) / 6,
    "by a clamp": lambda x: torch.clamp(3 + x, 0, 6) * x * (1 / 6),
    "with names": lambda x: x * (x + 3).clamp(min=0, max=6) / 6,
    "by hardtanh": lambda x: x * F.hardtanh(x + 3, 0.0, 6.0) / 6,
    "by its gate": lambda x: x * F.hardsigmoid(x),
}
OTHERS: dict[str, Function] = {
    "another shift": lambda x: x * F.relu6(x + 2) / 6,
    "another bound": lambda x: x * torch.clamp(x + 3, 0, 5) / 6,
    "another share": lambda x: x * F.relu6(x + 3) / 5,
    "another factor": lambda x: (x + 1) * F.relu6(x + 3) / 6,
    "a bound missing": lambda x: x * torch.clamp(x + 3, min=0) / 6,
    "the reciprocal": lambda x: 6 / (x * F.relu6(x + 3)),
}


class Written(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def rewritten(model: nn.Module, x: torch.Tensor) -> tuple[fx.GraphModule, int]:
    module = fx.symbolic_trace(model)
    write = GraphRewriter(module, values=GraphValues(module, (x,)))
    count = write.apply(hard_sigmoid, hard_swish)
    return module, count


@pytest.mark.parametrize("name", SWISHES)
def test_it_is_one_function(name: str) -> None:
    x = torch.linspace(-9, 9, 301)
    module, count = rewritten(Written(SWISHES[name]), x)
    targets = [node.target for node in module.graph.nodes if node.op == "call_function"]
    assert count >= 1 and targets == [F.hardswish]
    assert torch.allclose(module(x), SWISHES[name](x), atol=1e-6)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_something_else_stays(name: str) -> None:
    assert rewritten(Written(OTHERS[name]), torch.randn(8))[1] == 0


def test_the_gate_alone() -> None:
    module, count = rewritten(Written(lambda x: F.relu6(x + 3) / 6), torch.randn(8))
    assert count == 1 and F.hardsigmoid in [node.target for node in module.graph.nodes]


def test_what_is_read_elsewhere_stays() -> None:
    def shared(x: torch.Tensor) -> torch.Tensor:
        clamped = F.relu6(x + 3)
        return x * clamped / 6 + clamped

    assert rewritten(Written(shared), torch.randn(8))[1] == 0


def test_integers_stay() -> None:
    model = Written(lambda x: x * torch.clamp(x + 3, 0, 6) / 6)
    assert rewritten(model, torch.arange(8))[1] == 0


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_it_is_fused_with_what_makes_its_input(capture: str) -> None:
    """timm's own module of it, of which a trace sees the arithmetic."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), Written(SWISHES["timm's"]), nn.Conv2d(16, 8, 3))
    x = torch.randn(2, 3, 12, 12)
    quantized = backquant.quantize(model.eval(), x, calibration=[x], capture=capture, slower="keep")
    first = next(iter(quantized.kernels))
    assert "hardswish" in first.kernel
    with torch.no_grad():
        noise = (quantized(x) - model(x)).square().sum() / model(x).square().sum()
    assert noise < 1e-3
