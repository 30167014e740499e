"""Dynamic sizes whose guards nobody can prove: tried out, and refused where a size breaks one."""

from __future__ import annotations

import benchmarks.stock  # noqa: F401 - torchvision, which facenet imports
import numpy as np
import onnxruntime
import pytest
import torch
from torch import fx, nn

import backquant
from backquant.deploy.program import export_program
from backquant.deploy.session import load_exported
from backquant.errors import ExportError

FREE = {"input": {0: "batch", 2: "h", 3: "w"}}


class Pairs(nn.Module):
    """Takes even heights only."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        batch, channels, height, width = input.shape
        return input.view(batch, channels, height // 2, 2, width).sum(3)


def test_a_size_that_the_model_does_not_take_is_named() -> None:
    module = fx.symbolic_trace(Pairs())
    with pytest.raises(ExportError, match=r"fails where .*axis 2 of 'input' is 49"):
        export_program(module, (torch.randn(2, 3, 48, 48),), {}, FREE)


def test_pooling_that_rounds_up_leaves_no_assertions() -> None:
    module = fx.symbolic_trace(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, 2, ceil_mode=True))
    )
    program = export_program(module, (torch.randn(2, 3, 48, 48),), {}, FREE)
    calls = [str(n.target) for n in program.exported.graph.nodes if "aten" in str(n.target)]
    assert calls[-2:] == ["aten.conv2d.default", "aten.max_pool2d.default"]
    assert not any("assert" in call for call in calls)


def test_mtcnn_runs_on_pictures_of_any_size(tmp_path) -> None:
    """facenet-pytorch's trained proposal network: an image pyramid is what it is for."""
    from facenet_pytorch.models.mtcnn import PNet

    torch.manual_seed(0)
    model, batch = PNet().eval(), torch.rand(2, 3, 48, 48) * 2 - 1
    quantized = backquant.quantize(model, batch, backend="onnxruntime", calibration=[batch])
    free = {"x": {0: "batch", 2: "h", 3: "w"}}
    backquant.export(quantized, tmp_path / "m.onnx", dynamic_shapes=free, require=0.0)
    session = onnxruntime.InferenceSession(
        str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"]
    )
    name = session.get_inputs()[0].name
    for size in ((1, 3, 37, 50), (3, 3, 12, 65)):
        x = torch.rand(size) * 2 - 1
        for found, wanted in zip(session.run(None, {name: x.numpy()}), quantized(x), strict=True):
            assert found.shape == tuple(wanted.shape)
            assert np.abs(found - wanted.numpy()).max() < 0.2


class Steps(nn.Module):
    """A convolution for each time step, the mean and the maximum of them, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(2 * 4 * 6 * 6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = self.conv(x.flatten(0, 1)).relu().unflatten(0, (-1, 4)).flatten(2)
        return self.fc(torch.cat([steps.mean(1), steps.amax(1)], 1))


TARGETS = {
    "onnx": ("onnxruntime", "onnx"),
    "openvino": ("openvino", "xml"),
    "litert": ("litert", "tflite"),
    "executorch": ("xnnpack", "pte"),
    "inductor": ("inductor_x86", "pt2"),
}


@pytest.mark.parametrize("target", TARGETS)
def test_batches_rise_and_fall_in_one_loaded_file(target: str, tmp_path) -> None:
    backend, suffix = TARGETS[target]
    torch.manual_seed(0)
    x, path = torch.randn(4, 4, 3, 8, 8), tmp_path / f"m.{suffix}"
    seven = backquant.default_mapping(backend, weight_bits=7)  # no sum overflows without VNNI
    model = backquant.quantize(
        Steps().eval(), backend=backend, calibration=[x, 1.5 * x], qconfig_mapping=seven
    )
    free = {"x": {0: "batch<=16"}}
    backquant.export(model, path, to=target, example_inputs=x, dynamic_shapes=free, require=0.0)
    loaded = load_exported(path, 1)
    for batch in (7, 12, 5, 12, 16, 3, 9):
        given = torch.randn(batch, 4, 3, 8, 8)
        [found], wanted = loaded.run([given.numpy()]), model(given)
        error = torch.as_tensor(found) - wanted
        assert error.norm() < 0.02 * wanted.norm(), batch
