"""Answers equal PyTorch's, in one pass."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import backquant
from backquant.graph import GraphIndex, known_types
from backquant.graph.arguments import ordered_arguments


@fx.wrap
def sizes(values: list[int], extra: int) -> int:
    return sum(values) + extra


class Sizes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x, y):
        b, t = x.size(0), x.shape[1]
        n = b * t
        z = torch.cat([x, y], 0)
        zeros = x.new_zeros(b, 2)
        pair = torch.stack([zeros, self.fc(x)])
        names = sizes([b, t], 3)
        rank = x.ndim + 1
        half = b / 2.0
        return z.view(n, -1), pair, names, rank, half, torch.ones(()), x.dim() + 1, [b, t], (b, x)


def test_no_tensors_like_torch() -> None:
    from torch.ao.quantization.fx.utils import all_node_args_have_no_tensors

    gm = fx.symbolic_trace(Sizes())
    index = GraphIndex(gm)
    modules = dict(gm.named_modules())
    for node in gm.graph.nodes:
        if node.op != "output":
            expected = all_node_args_have_no_tensors(node, modules, {})
            # PyTorch observes half of a size and what is computed from x.dim(), numbers both, and fails.
            numbers = {"truediv", "dim", "add_1"}
            assert index.has_no_tensors(node) is (expected or node.name in numbers), node
    assert any(index.has_no_tensors(node) for node in gm.graph.nodes)


def test_known_types_like_torch() -> None:
    from torch.ao.quantization.fx.utils import get_non_observable_arg_indexes_and_types

    def forward(x, m, i):
        x = x.masked_fill(m, 2.0).permute(i, 1).repeat(i, 2).reshape(i)
        return x.transpose(0, i).unsqueeze(i).unsqueeze_(i).view(i, -1).size(i)

    gm = fx.symbolic_trace(forward)
    expected = {}
    for node in gm.graph.nodes:
        for kind, positions in get_non_observable_arg_indexes_and_types(node).items():
            for position in positions(node):
                if isinstance(node.args[position], fx.Node):
                    expected[node.args[position]] = kind
    assert known_types(gm.graph, lambda node: False) == expected
    assert {node.name for node in expected} == {"m", "i"}


def test_known_types_pass_through_sharing_operators() -> None:
    gm = fx.symbolic_trace(lambda x, m: x.masked_fill(torch.flatten(m).squeeze(), 0.0))
    found = known_types(gm.graph, lambda node: node.name in ("squeeze", "flatten"))
    assert [node.name for node in found] == ["squeeze", "flatten", "m"]


def test_indexes() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.relu = nn.ReLU()
            self.w = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.relu(self.relu(x) * self.w).abs()

    index = GraphIndex(fx.symbolic_trace(Net()))
    assert [node.name for node in index.callers["relu"]] == ["relu", "relu_1"]
    assert [node.name for node in index.readers["w"]] == ["w"]
    assert [node.name for node in index.calls()] == ["relu", "mul", "relu_1", "abs_1"]
    keys = [index.key(node) for node in index.calls()]
    assert [(key.kind, key.op) for key in keys if key] == [
        ("module", nn.ReLU),
        ("function", operator.mul),
        ("module", nn.ReLU),
        ("method", "abs"),
    ]
    assert index.key(index.nodes["x"]) is None


def named(x: Any, y: Any, z: int = 3) -> Any:
    return x


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda x: torch.add(x, 1), "(x, 1)"),
        (lambda x: torch.add(input=x, other=1), "(x, 1)"),
        (lambda x: torch.add(x, other=1), "(x, 1)"),
        (lambda x: torch.add(x, 1, alpha=2), "(x, 1, 2)"),
        (lambda x: F.relu(x), "(x,)"),  # noqa: PLW0108
        (lambda x: F.relu(x, True), "(x,)"),
        (lambda x: F.relu(input=x, inplace=True), "(x,)"),
        (lambda x: F.linear(x, bias=None, weight=x), "(x, x)"),
        (lambda x: x.add(1), "(x, 1)"),
        (lambda x: x.add(other=1), "None"),
        (lambda x: x + 1, "(x, 1)"),
        (lambda x: F.softmax(x, dtype=torch.float64), "None"),
    ],
)
def test_ordered_arguments(build: Any, expected: str) -> None:
    gm = fx.symbolic_trace(build)
    (node,) = (n for n in gm.graph.nodes if n.op.startswith("call"))
    assert str(ordered_arguments(node)) == expected


def test_ordered_arguments_of_modules() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 1)

        def forward(self, x):
            return self.fc(input=x)

    index = GraphIndex(fx.symbolic_trace(Net()))
    node = index.nodes["fc"]
    assert str(ordered_arguments(node, index.module_of(node))) == "(x,)"


@pytest.mark.parametrize("read", [lambda x: x.dim() - 2, lambda x: x.ndimension() - 2])
def test_what_is_computed_from_the_rank_is_not_observed(read) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            x = self.fc(x)
            return self.fc(x.mean(read(x)))

    x, mapping = torch.randn(2, 3, 4), backquant.get_default_qat_qconfig_mapping("x86")
    prepared = backquant.prepare_qat_fx(Mean(), mapping, (x,), backend_config="x86")
    assert prepared(x).shape == (2, 4)


@pytest.mark.parametrize(
    ("fill", "is_tensor"),
    [
        (lambda n: torch.ops.aten.zeros.default([n, 3]), True),
        (lambda n: torch.ops.aten.ones.default([n], dtype=torch.float32), True),
        (lambda n: torch.ops.aten.full.default([n], 0.0), True),
        (lambda n: torch.ops.aten.full.default([n], 0), False),
        (lambda n: torch.ops.aten.full.default([n], 0, dtype=torch.float32), True),
        (lambda n: torch.ops.aten.zeros.default([n], dtype=torch.bool), False),
        (torch.ops.aten.arange.default, False),
    ],
)
def test_exported_graphs_fill_tensors(fill: Any, is_tensor: bool) -> None:
    gm = fx.symbolic_trace(lambda x: fill(x.size(0)))
    index = GraphIndex(gm)
    [made] = (node for node in gm.graph.nodes if node.op == "call_function")
    assert index.has_no_tensors(made) is not is_tensor


def test_zeros_that_a_product_reads_are_rounded() -> None:
    """A recurrent attention begins with such a state (MiniMax); the product counted as quantized."""

    class State(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, state = self.query(x), torch.zeros(x.shape[0], 8, 8).to(x)
            return query @ state + query @ self.key(x).transpose(1, 2)

    x = torch.randn(2, 8, 8)
    made = backquant.quantize(State().eval(), x, backend="onnxruntime", calibration=[x])
    products = [node for node in made.graph_module.graph.nodes if node.target is torch.matmul]
    assert len(products) == 2
    assert all("dequantize" in str(a.target) for node in products for a in node.args)


@pytest.mark.parametrize("backend", ["x86", "fbgemm", "xnnpack"])
@pytest.mark.parametrize(
    "used",
    [
        lambda y: y + len(y),
        lambda y: y / y.numel(),
        lambda y: y * y.numel() ** -0.5,
        lambda y: y / math.sqrt(y.shape[0]),
        lambda y: y * float(y.shape[0]),
        lambda y: y + (y.stride(0) + y.shape[0] // 2),
        lambda y: y.numel() - y,
        lambda y: y * y.max().item(),
    ],
)
def test_numbers_of_exported_graphs_are_not_observed(
    used: Callable[[torch.Tensor], torch.Tensor], backend: str
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(used(self.linear(x)))

    model, x = Model().eval(), torch.randn(4, 6)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    quantized = backquant.quantize(program, [x], backend=backend)
    wanted = model(x)
    assert (quantized(x) - wanted).norm() < 0.3 * wanted.norm()
