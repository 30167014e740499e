"""Operators whose values reach no output are in no file, and are not expected in one."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import backquant
from backquant.deploy.run import unread_nodes


def like(x: Tensor) -> Tensor:
    return torch.zeros_like(x.sin()) + x


def new(x: Tensor) -> Tensor:
    return x.sin().new_ones(2) + x


def size(x: Tensor) -> Any:
    return x.sin().size(0) + x


def shape(x: Tensor) -> Any:
    return x.sin().shape[0] + x


def full(x: Tensor) -> Tensor:
    return torch.full_like(x, x.sin().max()) + x


def copied(x: Tensor) -> Tensor:
    out = x.clone()
    out.narrow(0, 0, 1).copy_(x.sin())
    return out


@pytest.mark.parametrize("read", [like, new, size, shape])
def test_what_gives_sizes_alone(read: Any) -> None:
    assert unread_nodes(fx.symbolic_trace(read).graph) == {"sin"}


@pytest.mark.parametrize("read", [full, copied])
def test_what_is_read(read: Any) -> None:
    assert not unread_nodes(fx.symbolic_trace(read).graph)


def test_a_part_that_is_added_to() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    out = graph.call_method("clone", (x,))
    part = graph.call_function(operator.getitem, (out, 0))
    graph.call_function(operator.iadd, (part, graph.call_method("sin", (x,))))
    graph.output(out)
    assert not unread_nodes(graph)


class Zeros(nn.Module):
    """As MRA without its own kernels: zeros like the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.zeros_like(self.query(x)) + x)


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_they_are_not_expected(backend: str, tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    made = backquant.quantize(Zeros().eval(), x, backend=backend, calibration=[x], slower="keep")
    path = tmp_path / ("m.xml" if backend == "openvino" else "m.onnx")
    exported = backquant.export(made, path, example_inputs=x)
    assert exported.integer == exported.expected
    assert exported.integer_share == 1.0
    assert any("out" in use.nodes for use in exported.kernels)
