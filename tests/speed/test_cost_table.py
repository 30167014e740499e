"""What values cost that go between integers and floats."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx, nn
from torch.nn import functional as F

import backquant
from backquant.speed.cost_table import TimedConversions, Times, cost_table

X = torch.randn(4, 8)


class Functional(nn.Module):
    """Its weight is a tensor of the graph, not of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass
class Timed:
    module: fx.GraphModule
    seconds: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


def test_weights_in_the_graph_are_quantized_before() -> None:
    floats = fx.symbolic_trace(Functional())
    sizes = {node.name: 100 for node in floats.graph.nodes if node.op != "output"}
    made = backquant.quantize(Functional(), X, calibration=[X], slower="keep")
    conversions = TimedConversions(lambda run: 1e-6)
    times = Times(Timed(floats, sizes=sizes), Timed(made.graph_module), {}, conversions)
    assert {"weight", "bias"} < sizes.keys()
    assert [value.node for value in cost_table(made, times).values] == ["x", "linear"]


def test_calling_is_no_part_of_a_conversion() -> None:
    """Of a call of nothing, and of each conversion of any size, 8 µs are the call itself."""
    conversions = TimedConversions(lambda run: 8e-6 + (1e-6 if run().numel() else 0.0))  # type: ignore[attr-defined]
    for size in (1, 1 << 12, 1 << 20):
        assert round(conversions.quantize(size), 3) == round(conversions.dequantize(size), 3) == 1.0
