"""Layers that are called several times run on integers where their results are scaled."""

from __future__ import annotations

from pathlib import Path

import openvino
import pytest
import torch
from torch import Tensor, nn

import backquant


class Steps(nn.Module):
    """A recurrent cell, as in CfC of ncps."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.out, self.factor = nn.Linear(24, 32), nn.Linear(32, 16), factor

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        for step in range(3):
            inner = self.cell(torch.cat([x[:, step], state], 1))
            inner = inner * self.factor if self.factor != 1 else inner
            state = self.out(1.7159 * torch.tanh(inner)).sigmoid()
        return state


@pytest.mark.parametrize(("factor", "copies"), [(0.666, 2), (1.0, 0)])
def test_shared_weights(factor: float, copies: int, tmp_path: Path) -> None:
    model, x = Steps(factor).eval(), (torch.randn(2, 3, 8), torch.zeros(2, 16))
    made = backquant.quantize(model, x, backend="openvino", calibration=[x], slower="keep")
    exported = backquant.export(made, tmp_path / "m.xml", example_inputs=x)
    assert exported.integer == exported.expected == 6
    hints = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(tmp_path / "m.xml", "CPU", hints)
    found = torch.from_numpy(compiled([value.numpy() for value in x])[0])
    torch.testing.assert_close(found, made(*x), rtol=0, atol=0.01)
    read = openvino.Core().read_model(tmp_path / "m.xml")
    weights = [
        op for op in read.get_ops() if op.get_friendly_name().startswith("module.cell.weight")
    ]
    weights = [op for op in weights if op.get_output_shape(0) == [32, 24]]
    assert len(weights) == 1 + copies
