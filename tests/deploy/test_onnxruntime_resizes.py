"""Bicubic resizing to a known size is two products: ONNX Runtime's own is many times as slow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backquant

Function = Callable[[torch.Tensor], torch.Tensor]


class Resized(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.conv = function, nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.function(x))


def kinds(function: Function, path: Path, **more: object) -> list[str]:
    """The operators of the file, which gives what the model gives."""
    torch.manual_seed(0)
    x, net = torch.randn(2, 3, 10, 12), Resized(function).eval()
    model = backquant.quantize(net, backend="onnxruntime", calibration=[x])
    backquant.export(model, path, example_inputs=x, **more)
    [found] = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=0, atol=0.03)
    return [node.op_type for node in onnx_ir.load(path).graph]


@pytest.mark.parametrize("corners", [False, True])
def test_a_known_size(corners: bool, tmp_path: Path) -> None:
    function = lambda x: F.interpolate(x, (9, 16), mode="bicubic", align_corners=corners)  # noqa: E731
    found = kinds(function, tmp_path / "m.onnx")
    assert found.count("MatMul") == 2
    assert "Resize" not in found


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_other_modes_stay(mode: str, tmp_path: Path) -> None:
    assert "Resize" in kinds(lambda x: F.interpolate(x, (9, 16), mode=mode), tmp_path / "m.onnx")


def test_a_free_size_stays(tmp_path: Path) -> None:
    function = lambda x: F.interpolate(x, (9, 16), mode="bicubic")  # noqa: E731
    shapes = {"x": {2: "rows"}}
    assert "Resize" in kinds(function, tmp_path / "m.onnx", dynamic_shapes=shapes)
