"""Outputs that are quantized only where a quantized operator reads them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import QDQRules


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.b(self.a(x)))


def quantized_values(rules: QDQRules | None) -> list[str]:
    """What is quantized in the graph, by the node whose value it is."""
    config = backquant.get_backend_config("onnxruntime").set_qdq(rules)
    made = backquant.quantize(Two().eval(), backend=config, calibration=[torch.randn(4, 8)])
    graph = made.graph_module.graph
    return [n.args[0].name for n in graph.nodes if "quantize_per_tensor" in n.name[:20]]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (None, ["x", "a", "b"]),
        (QDQRules(), ["x", "a", "b"]),
        (QDQRules(float_outputs=(nn.Linear,)), ["x", "a"]),
        (QDQRules(float_outputs=(nn.Conv2d,)), ["x", "a", "b"]),
        (QDQRules(quantized_outputs="where_read"), ["x", "a"]),
    ],
)
def test_outputs(rules: QDQRules | None, expected: list[str]) -> None:
    assert quantized_values(rules) == expected
