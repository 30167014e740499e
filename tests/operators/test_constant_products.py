"""Products with constant matrices are linear layers, in a trace and in an export."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import backquant
from backquant.graph import GraphRewriter, capture
from backquant.operators.computed_parameters import linear_product


class Products(nn.Module):
    """A product with a bias, and one without; ``squared``: and one of two activations."""

    def __init__(self, squared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ParameterList([torch.randn(8, 12) / 3, torch.randn(12)])
        self.register_buffer("second", torch.randn(12, 6) / 3)
        self.squared = squared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first[1] + x @ self.first[0]).matmul(self.second)
        return x.transpose(1, 2) @ x if self.squared else x


def test_what_is_a_linear_layer() -> None:
    model, x = Products(squared=True).eval(), torch.randn(2, 5, 8)
    traced = capture(model).module
    assert GraphRewriter(traced).apply(linear_product) == 2
    targets = [node.target for node in traced.graph.nodes if node.op != "get_attr"]
    assert targets.count(F.linear) == 2
    assert targets.count(operator.matmul) == 1
    assert operator.add not in targets
    assert torch.allclose(traced(x), model(x), atol=1e-5)
    kept = GraphRewriter(capture(model).module, kept={operator.matmul})
    assert kept.apply(linear_product) == 1


def test_a_matrix_that_changes_is_none() -> None:
    graph = fx.Graph()
    x, matrix = graph.placeholder("x"), graph.get_attr("second")
    graph.call_method("add_", (matrix, 1))
    graph.output(graph.call_function(torch.matmul, (x, matrix)))
    assert GraphRewriter(fx.GraphModule(Products(), graph)).apply(linear_product) == 0


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_they_are_quantized_as_linear_layers(capture: str) -> None:
    x = torch.randn(2, 5, 8)
    options = {"backend": "onnxruntime", "capture": capture, "calibration": [x]}
    quantized = backquant.quantize(Products().eval(), x, **options)
    rows = {row.operator: row.outcome for row in quantized.report.rows if row.multiply_adds}
    assert rows == {"F.linear": "quantized"}
    assert torch.allclose(quantized(x), Products()(x), atol=0.1)


def test_a_mapping_that_names_the_product_decides() -> None:
    x = torch.randn(2, 5, 8)
    named = backquant.default_mapping("x86").set_object_type(operator.matmul, None)
    quantized = backquant.quantize(Products().eval(), qconfig_mapping=named, calibration=[x])
    assert [row.outcome for row in quantized.report.rows if row.multiply_adds] == [
        "float",
        "quantized",
    ]
