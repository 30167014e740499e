from __future__ import annotations

from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn

import backquant
from backquant.deploy.examples import with_two_on_free_axes


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        ({"x": {0: "batch"}}, (2, 1, 3)),
        ({"x": {0: torch.export.Dim.AUTO, 1: "n"}}, (2, 2, 3)),
        ({"x": {-2: "n"}}, (1, 2, 3)),
        (({0: "batch"},), (2, 1, 3)),
        ({"x": {2: "free already"}}, (1, 1, 3)),
        ({"x": {0: torch.export.Dim.STATIC}}, (1, 1, 3)),
        ({"x": {0: 1, 1: None, 7: "no such axis"}}, (1, 1, 3)),
        ({"y": {0: "batch"}}, (1, 1, 3)),
        ({"x": None}, (1, 1, 3)),
        (None, (1, 1, 3)),
    ],
)
def test_axes_of_free_size(shapes: Any, size: tuple[int, ...]) -> None:
    x = torch.randn(1, 1, 3)
    args, kwargs = with_two_on_free_axes((x,), {}, shapes, ["x"])
    assert args[0].shape == size and kwargs == {}
    if not isinstance(shapes, tuple):
        args, kwargs = with_two_on_free_axes((), {"x": x}, shapes, [])
        assert kwargs["x"].shape == size and args == ()


def test_a_model_quantized_with_one_sample_at_a_time(tmp_path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5)).eval()
    batches = [torch.randn(1, 3, 5, 5) for _ in range(4)]
    quantized = backquant.quantize(model, backend="onnxruntime", calibration=batches)
    path = tmp_path / "model.onnx"
    backquant.export(quantized, path, dynamic_shapes={"input": {0: "batch"}})
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (1, 2, 7):
        x = torch.randn(batch, 3, 5, 5)
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert found.shape == (batch, 5)
        assert (torch.from_numpy(found) - quantized(x)).abs().max() < 0.05
