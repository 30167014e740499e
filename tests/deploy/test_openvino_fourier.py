"""Fourier transforms are what the reference model computes: OpenVINO reads most of them wrongly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir
import openvino
import pytest
import torch
from torch import fft, nn

import backquant
from backquant.deploy.openvino.workarounds import plain_transforms


class Behind(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(20, 20), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.fc(x))


def run(path: Path, x: torch.Tensor) -> torch.Tensor:
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = openvino.Core().compile_model(str(path), "CPU", settings)
    return torch.from_numpy(compiled(x.numpy())[0].copy())


TRANSFORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of reals": lambda x: torch.view_as_real(fft.rfft(x)),
    "of reals, read inside": lambda x: torch.view_as_real(fft.rfft(x, norm="ortho")).relu(),
    "along another axis": lambda x: fft.rfft(x, dim=1).abs(),
    "along two axes": lambda x: fft.fft2(x).real,
    "and back": lambda x: fft.ifft(fft.fft(x) * 2.0).real,
    "and back to reals": lambda x: fft.irfft(fft.rfft(x) * 2.0),
    "and back to an odd length": lambda x: fft.irfft(fft.rfft(x[..., :19]) * 2.0, n=19),
    "and back along two axes": lambda x: fft.irfft2(fft.rfft2(x) * 2.0),
    "and back along the first": lambda x: fft.irfft(fft.rfft(x, dim=0) * 2.0, n=2, dim=0),
}


@pytest.mark.parametrize("opset", [18, 20])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name: str, opset: int, tmp_path: Path) -> None:
    """From opset 20 on, the axis is an input."""
    torch.manual_seed(0)
    x, net = torch.randn(2, 6, 20), Behind(TRANSFORMS[name]).eval()
    model = backquant.quantize(net, backend="openvino", calibration=[x], slower="keep")
    path = tmp_path / "m.xml"
    backquant.export(model, path, example_inputs=x, options={"opset": opset})
    found = run(path, x)
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-3)


def test_what_is_not_known_is_left_alone() -> None:
    """An axis that is computed, and an inverse of a length that is."""
    for version in (18, 20):
        x = onnx_ir.Value(name="x", shape=onnx_ir.Shape([2, 4, 6, 2]))
        given = onnx_ir.Value(name="given")
        inputs = [x, given] if version == 18 else [x, None, given]
        node = onnx_ir.node("DFT", inputs, {"inverse": 1, "onesided": 1}, name="dft")
        graph = onnx_ir.Graph([x, given], node.outputs, nodes=[node], opset_imports={"": version})
        plain_transforms(onnx_ir.Model(graph, ir_version=9))
        assert list(graph) == [node]
        assert node.attributes["onesided"].as_int() == 1
