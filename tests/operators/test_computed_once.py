"""Equal products are one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import backquant
from backquant.graph.provenance import Scope
from backquant.operators.computed_once import computed_once

ONCE: dict[str, Any] = {
    "products": lambda x: (x @ x.transpose(0, 1)).relu() + (x @ x.transpose(0, 1)).sin(),
    "of functions": lambda x: F.linear(x, x).relu() + F.linear(x, x).sin(),
    "of methods": lambda x: x.matmul(x) - x.matmul(x).sin(),
}
TWICE: dict[str, Any] = {
    "other values": lambda x: (x @ x) + (x @ x.transpose(0, 1)),
    "other constants": lambda x: (x @ (x * 2)) + (x @ (x * 3)),
    "random": lambda x: (x @ torch.rand_like(x)) + (x @ torch.rand_like(x)),
    "dropped at random": lambda x: (x @ F.dropout(x)) + (x @ F.dropout(x)),
    "written to": lambda x: (x @ x).relu_() + (x @ x),
    "a view is written to": lambda x: (x @ x).view(-1).relu_().view(3, 3) + (x @ x),
}


def between(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    one = x @ x
    x.add_(1)
    return one + x @ x


def between_by_a_view(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    rows = x.view(3, 3)
    one = rows @ rows
    x[0].add_(1)
    return one + rows @ rows


def between_by_another_name(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    same = x.add_(1)
    one = same @ same
    x.mul_(2)
    return one + same @ same


WRITTEN = [between, between_by_a_view, between_by_another_name]


@pytest.mark.parametrize("function", WRITTEN)
def test_what_is_written_to_between_is_read_again(function: Any) -> None:
    module, x = fx.symbolic_trace(function), torch.randn(3, 3)
    assert computed_once(module, {}) == 0
    assert torch.equal(module(x), function(x))


@pytest.mark.parametrize("name", ONCE)
def test_equal_products_are_one(name: str) -> None:
    module, x = fx.symbolic_trace(ONCE[name]), torch.randn(3, 3)
    nodes = len(module.graph.nodes)
    assert computed_once(module, {}) == 1
    assert len(module.graph.nodes) < nodes
    assert torch.equal(module(x), ONCE[name](x))


@pytest.mark.parametrize("name", TWICE)
def test_what_may_differ_is_computed_again(name: str) -> None:
    module = fx.symbolic_trace(TWICE[name])
    assert computed_once(module, {}) == 0


def test_what_the_user_names_and_other_modules_stay() -> None:
    module = fx.symbolic_trace(ONCE["products"])
    names = [node.name for node in module.graph.nodes if "matmul" in node.name]
    other = {name: Scope(name, None) for name in names}
    assert computed_once(module, other) == 0
    targets = {node.target for node in module.graph.nodes}
    assert computed_once(module, {}, targets) == 0


class Spikes(nn.Module):
    """A layer that each step calls on the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(())
        for _ in range(3):
            state = 0.5 * state + self.conv(x)
        return state


def test_a_layer_called_twice_is_one_kernel() -> None:
    torch.manual_seed(0)
    model, x = Spikes().eval(), torch.randn(2, 3, 8, 8)
    quantized = backquant.quantize(model, x, backend="x86", calibration=[x], slower="keep")
    assert len([use for use in quantized.kernels if "conv" in use.kernel]) == 1
    assert quantized.report.coverage == 1.0
    torch.testing.assert_close(quantized(x), model(x), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_exports_find_its_kernel(backend: str, tmp_path: Path) -> None:
    pytest.importorskip(backend)
    torch.manual_seed(0)
    model, x = Spikes().eval(), torch.randn(2, 3, 8, 8)
    quantized = backquant.quantize(model, x, backend=backend, calibration=[x], slower="keep")
    path = tmp_path / ("model.onnx" if backend == "onnxruntime" else "model.xml")
    assert backquant.export(quantized, path, example_inputs=x).integer_share == 1.0
