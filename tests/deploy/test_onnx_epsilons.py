"""Epsilons that the exporter's optimizer takes for zero are in the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import backquant

onnxruntime = pytest.importorskip("onnxruntime")

Function = Callable[[torch.Tensor], torch.Tensor]
FUNCTIONS: dict[str, Function] = {
    "behind": lambda x: (x + 1e-15).log(),
    "before": lambda x: (1e-9 + x).log(),
    "subtracted": lambda x: (x - 1e-9).neg().log(),
    "of a number": lambda x: (x.mean() + 1e-15).log(),
}


class Logarithm(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(8, 4), function

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.fc(x)
        return y, self.function(torch.relu(y) * 0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_are_added(name: str, tmp_path: Path) -> None:
    model, x = Logarithm(FUNCTIONS[name]).eval(), torch.randn(4, 8)
    quantized = backquant.quantize(model, x, backend="onnxruntime", calibration=[x], slower="keep")
    backquant.export(quantized, tmp_path / "model.onnx", example_inputs=x)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[1]
    wanted = model(x)[1]
    assert wanted.isfinite().all()
    assert torch.allclose(torch.from_numpy(found), wanted, rtol=1e-4)
