"""Whole models: written, read back from LiteRT's interpreter, and run there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.deploy.litert.target import LoadedFile
from backquant.deploy.roundings import ratio


class Small(nn.Module):
    """The operators of image models: with padding on all sides, on one side, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.head = nn.Linear(8 * 4 * 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        y = nn.functional.relu6(self.depthwise(x))
        return torch.softmax(self.head(self.pool(x + y).flatten(1)), 1)


def quantized(model: nn.Module, *inputs: torch.Tensor, backend: str = "litert") -> Any:
    return backquant.quantize(model.eval(), inputs, backend=backend, calibration=[inputs])


def test_an_image_model_has_one_transpose_and_runs_on_integers(tmp_path: Path) -> None:
    x = torch.rand(2, 3, 16, 16)
    model = quantized(Small(), x)
    path = tmp_path / "model.tflite"
    exported = backquant.export(model, path)
    assert exported.integer_share == 1.0
    assert exported.target == "litert"
    kinds = [each.kernel.partition(" ")[0] for each in exported.kernels]
    assert kinds.count("TRANSPOSE") == 1
    assert all(each.integer for each in exported.kernels if each.kernel.startswith("CONV_2D"))
    [made] = LoadedFile(path.read_bytes()).run([x.numpy()])
    assert ratio([model(x)], [torch.from_numpy(made)]) > 30


def test_channels_last_and_integers_at_the_edges(tmp_path: Path) -> None:
    x = torch.rand(2, 3, 16, 16)
    model = quantized(Small(), x)
    path = tmp_path / "model.tflite"
    options = {"channels_last": True}
    exported = backquant.export(model, path, options=options, integer_io=True)
    kinds = {each.kernel.partition(" ")[0] for each in exported.kernels}
    assert kinds.isdisjoint({"TRANSPOSE", "QUANTIZE", "DEQUANTIZE"})


def test_a_name_that_ends_so_needs_no_target(tmp_path: Path) -> None:
    model = quantized(nn.Sequential(nn.Linear(4, 3)), torch.rand(2, 4))
    assert backquant.export(model, tmp_path / "model.tflite").target == "litert"


def test_other_dtypes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    model = quantized(nn.Sequential(nn.Linear(4, 3)), torch.rand(2, 4), backend="openvino")
    with pytest.raises(backquant.ExportError, match="LiteRT computes with int8 or int16"):
        backquant.export(model, tmp_path / "model.tflite", to="litert")
    assert not list(tmp_path.iterdir())
