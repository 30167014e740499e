"""A product whose clipped result stays float runs on ONNX Runtime's integer kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backquant

Function = Callable[[Tensor], Tensor]


class Spectrum(nn.Module):
    """As a mel spectrogram: the bands of a power, and their logarithms."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.bands = function, nn.Parameter(torch.rand(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x.square() @ self.bands)


def kinds(function: Function, path: Path) -> list[str]:
    """The operators of the file, which gives what the model gives, under the same name."""
    x, net = torch.randn(4, 16), Spectrum(function).eval()
    model = backquant.quantize(net, backend="onnxruntime", calibration=[x])
    exported = backquant.export(model, path, example_inputs=x)
    assert exported.integer == exported.expected == 1
    session = onnxruntime.InferenceSession(path)
    found = torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
    torch.testing.assert_close(found, model(x), rtol=0, atol=1e-4)
    return [node.op_type for node in onnx_ir.load(path).graph]


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda y: y.clamp(min=1e-3).log(), ["Max"]),
        (lambda y: y.clamp(max=5.0).sin(), ["Min"]),
        (lambda y: y.clamp(4.0, 6.0).log(), ["Max", "Min"]),
        (lambda y: F.relu(y).sqrt(), ["Max"]),
    ],
)
def test_clipped_floats(function: Function, wanted: list[str], tmp_path: Path) -> None:
    found = kinds(function, tmp_path / "m.onnx")
    assert [kind for kind in found if kind in ("Max", "Min", "Clip", "Relu")] == wanted


def test_a_clip_of_other_values_stays(tmp_path: Path) -> None:
    assert "Clip" in kinds(lambda y: y.cos().clamp(-0.5, 0.5).sin(), tmp_path / "m.onnx")


def test_an_output_keeps_its_name(tmp_path: Path) -> None:
    class Two(Spectrum):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            clipped = (x.square() @ self.bands).clamp(min=1e-3)
            return clipped, clipped.log()

    x, path = torch.randn(4, 16), tmp_path / "m.onnx"
    model = backquant.quantize(Two(F.relu).eval(), backend="onnxruntime", calibration=[x])
    backquant.export(model, path, example_inputs=x)
    names = [value.name for value in onnx_ir.load(path).graph.outputs]
    assert names == ["output_0", "output_1"]
