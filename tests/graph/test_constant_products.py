"""Products with constant matrices are linear layers, in a trace and in an export."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant
from backquant.graph import capture, linear_products


class Products(nn.Module):
    """One product with a bias, one without; one of two activations, and one with a tensor that changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.ParameterList([torch.randn(8, 12) / 3, torch.randn(12)])
        self.register_buffer("second", torch.randn(12, 6) / 3)
        self.register_buffer("changed", torch.ones(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first[1] + x @ self.first[0]).matmul(self.second)
        return x.transpose(1, 2) @ x @ self.changed.add_(0)


def test_what_is_a_linear_layer() -> None:
    model = Products().eval()
    x = torch.randn(2, 5, 8)
    traced = capture(model).module
    assert linear_products(traced, {}) == 2
    targets = [node.target for node in traced.graph.nodes if node.op != "get_attr"]
    assert targets.count(F.linear) == 2
    assert targets.count(operator.matmul) == 2
    assert operator.add not in targets
    assert torch.allclose(traced(x), model(x), atol=1e-5)
    assert linear_products(capture(model).module, {}, {operator.matmul}) == 1


class Imported(Products):
    """Without what changes, which only an export takes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.first[1] + x @ self.first[0]).matmul(self.second)


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_they_are_quantized_as_linear_layers(capture: str) -> None:
    x = torch.randn(2, 5, 8)
    options = {"backend": "onnxruntime", "capture": capture, "calibration": [x]}
    quantized = backquant.quantize(Imported().eval(), x, **options)
    rows = {row.operator: row.outcome for row in quantized.report.rows if row.multiply_adds}
    assert rows == {"F.linear": "quantized"}
    assert torch.allclose(quantized(x), Imported()(x), atol=0.1)
    named = backquant.default_mapping("onnxruntime").set_object_type(operator.matmul, None)
    quantized = backquant.quantize(Imported().eval(), x, qconfig_mapping=named, **options)
    assert quantized.report.coverage == (1.0 if capture == "export" else pytest.approx(72 / 168))
