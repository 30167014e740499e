"""What the exporter's optimizer takes for zero or one is in the file."""

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


NEAR_ONE: dict[str, Function] = {
    "product": lambda x: x * (1 + 8e-6) - x,
    "in front": lambda x: (1 - 8e-6) * x - x,
    "quotient": lambda x: x / (1 - 8e-6) - x,
}


@pytest.mark.parametrize("name", NEAR_ONE)
def test_factors_near_one_are_multiplied(name: str, tmp_path: Path) -> None:
    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.fc(x), NEAR_ONE[name](x.abs() + 1)

    model, x = Difference().eval(), torch.randn(4, 8)
    quantized = backquant.quantize(model, x, backend="onnxruntime", calibration=[x], slower="keep")
    backquant.export(quantized, tmp_path / "model.onnx", example_inputs=x)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[1])
    wanted = model(x)[1]
    assert wanted.abs().min() > 5e-6
    assert torch.allclose(found, wanted, rtol=0.2)


REDUCED: dict[str, Function] = {
    "whole": lambda x: torch.stack(x.aminmax()),
    "axis": lambda x: torch.cat(torch.aminmax(x, dim=1, keepdim=True), 1),
    "one of them": lambda x: x.aminmax(dim=-1).max,
}


@pytest.mark.parametrize("name", REDUCED)
def test_least_and_greatest_at_once(name: str, tmp_path: Path) -> None:
    class Range(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.fc(x), REDUCED[name](x)

    model, x = Range().eval(), torch.randn(4, 8)
    quantized = backquant.quantize(model, x, backend="onnxruntime", calibration=[x], slower="keep")
    backquant.export(quantized, tmp_path / "model.onnx", example_inputs=x)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    found = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[1])
    assert torch.equal(found, model(x)[1])
