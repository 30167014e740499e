"""Results that only float operators read: not quantized by default, or on a target that gives floats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backquant
from backquant.backend_config import LeaveFloat, QDQRules


class Attention(nn.Module):
    """Projections that a float operator reads through views, and one that an integer operator reads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x).view(2, 5, 2, 4).transpose(1, 2)
        kv = self.kv(x).view(2, 5, 2, 4).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, kv, kv)
        return self.last(self.out(y.transpose(1, 2).reshape(2, 5, 8)))


def _quantizes(model: backquant.QuantizedModel) -> int:
    return sum("quantize" in str(n.target) for n in model.graph_module.graph.nodes)


def test_projections_of_attention() -> None:
    model = Attention().eval()
    batches = [torch.randn(2, 5, 8) for _ in range(4)]
    ours = backquant.quantize(model, calibration=batches)
    config = backquant.get_backend_config("x86")
    assert config.defaults is not None
    config.set_defaults(replace(config.defaults, leave_float=()))
    asked = backquant.quantize(model, backend=config, calibration=batches)
    # q and kv, read by attention, and the last one, read by nobody; that of out is read by last
    assert any(note.startswith("3 results of") for note in ours.report.notes)
    assert not any("results of" in note for note in asked.report.notes)
    dtypes = [k.dtype for k in ours.kernels if "linear" in k.kernel]
    assert dtypes == [torch.float32, torch.float32, torch.uint8, torch.float32]
    with torch.no_grad():
        wanted = model(batches[0])
    errors = [float((q(batches[0]) - wanted).abs().mean()) for q in (ours, asked)]
    assert errors[0] < errors[1]


class Mixed(nn.Module):
    """Results that an integer operator reads, and that a float operator reads through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.Softplus()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.b(self.a(x)))
        return self.act(F.linear(y, self.w).view(2, 2, 8))


def quantized_values(rules: QDQRules | None) -> list[str]:
    """What is quantized in the graph, by the node whose value it is."""
    config = backquant.get_backend_config("onnxruntime").set_qdq(rules)
    made = backquant.quantize(Mixed().eval(), backend=config, calibration=[torch.randn(4, 8)])
    graph = made.graph_module.graph
    return [n.args[0].name for n in graph.nodes if "quantize_per_tensor" in n.name[:20]]


def results(*operators: Any) -> QDQRules:
    return QDQRules(leave_float=(LeaveFloat(operators, results=True),))


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (None, ["x", "a", "relu", "linear", "view"]),
        (QDQRules(), ["x", "a", "relu", "linear", "view"]),
        (results(nn.Conv2d), ["x", "a", "relu", "linear", "view"]),
        (results(F.linear), ["x", "a", "relu"]),  # the view moves floats
        (results(nn.Linear), ["x", "a", "relu", "linear"]),  # a linear layer reads relu's
    ],
)
def test_on_a_target(rules: QDQRules | None, expected: list[str]) -> None:
    assert quantized_values(rules) == expected


@pytest.mark.parametrize("dims", [1, 2])
def test_transposed_convolutions_have_no_kernel_that_gives_floats(dims: int) -> None:
    """So their results are integers on x86, also where nobody reads them as such."""
    conv = (nn.Conv1d, nn.Conv2d)[dims - 1](8, 8, 3)
    transposed = (nn.ConvTranspose1d, nn.ConvTranspose2d)[dims - 1](8, 8, 3, stride=2)
    model = nn.Sequential(conv, nn.ReLU(), transposed, nn.Softplus()).eval()
    batches = [torch.randn(2, 8, *[9] * dims) for _ in range(2)]
    quantized = backquant.quantize(model, calibration=batches, slower="keep")
    assert quantized.report.coverage == 1.0
    assert any("conv_transpose" in use.kernel for use in quantized.kernels)
