"""Calls in place in a trace: later readers read the changed value."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backquant
from backquant.graph import capture
from backquant.graph.in_place import changed_view


class Discards(nn.Module):
    """Changes its values in place and reads them under their old names."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change = change
        self.one, self.two = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x)
        if self.change == "module":
            self.relu(y)
        elif self.change == "function":
            F.relu(y, inplace=True)
        elif self.change == "position":
            F.leaky_relu(y, 0.1, True)
        elif self.change == "overload":
            torch.relu_(y)
        else:
            y.clamp_(min=0)
        return self.two(y) + y[:, :, 1:-1, 1:-1]


@pytest.mark.parametrize("change", ["module", "function", "position", "overload", "method"])
def test_the_changed_value_is_read(change) -> None:
    torch.manual_seed(0)
    model, x = Discards(change).eval(), torch.randn(2, 3, 8, 8)
    wanted = model(x).detach()
    captured = capture(model).module
    assert torch.equal(captured(x), wanted)
    names = [node.name for node in captured.graph.nodes if node.op.startswith("call")]
    readers = next(n for n in captured.graph.nodes if n.name == names[1]).users
    assert [reader.name for reader in readers] == ["two", "getitem"]
    quantized = backquant.quantize(model, x, backend="onnxruntime", calibration=[x])
    noise = (quantized(x) - wanted).square().sum()
    assert 10 * torch.log10(wanted.square().sum() / noise) > 30


def test_a_graph_without_later_readers_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 1))
    nodes = [(n.name, str(n.args)) for n in capture(model).module.graph.nodes]
    plain = [(n.name, str(n.args)) for n in torch.fx.symbolic_trace(model).graph.nodes]
    assert nodes == plain


class Doubles(nn.Module):
    """Changes a part of its value in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).mean((2, 3))
        y[:, :4].mul_(8.0)
        return self.fc(y)


def test_a_changed_view_is_captured_by_export() -> None:
    torch.manual_seed(0)
    model, x = Doubles().eval(), torch.randn(2, 3, 8, 8)
    traced = capture(model).module
    assert changed_view(traced.graph, traced) == "mul_"
    quantized = backquant.quantize(model, x, backend="onnxruntime", calibration=[x])
    assert "captured by torch.export" in str(quantized.report)
    wanted = model(x).detach()
    noise = (quantized(x) - wanted).square().sum()
    assert 10 * torch.log10(wanted.square().sum() / noise) > 30
