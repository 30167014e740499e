from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import backquant
from backquant.deploy.session import running_target


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_what_a_runtime_gives_and_takes(backend: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32)).eval()
    x = torch.randn(16, 64)
    quantized = backquant.quantize(model, backend=backend, calibration=[x])
    path = tmp_path / "model.onnx"
    backquant.export(quantized, path, example_inputs=x, require=0.0)
    target = running_target(backend)
    assert target is not None
    session = target.session(path, threads=1)
    [found] = session.run([x.numpy()])
    wanted = quantized(x)
    error = (torch.from_numpy(found) - wanted).norm() / wanted.norm()
    assert float(error) < 0.02
    times = session.times([x.numpy()], rounds=1)
    nodes = {node.name for node in quantized.graph_module.graph.nodes}
    assert {"_0", "_2"} <= times.keys() and times.keys() - {""} <= nodes
    assert all(seconds >= 0 for seconds in times.values())


def test_layers_in_blocks_of_channels_are_told_apart(tmp_path: Path) -> None:
    """ONNX Runtime lays out float convolutions anew, and names them anew: before, their time was nobody's."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(16, 32, 3), nn.ReLU(), nn.BatchNorm2d(32), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 25, 8)),
    ).eval()
    x = torch.randn(1, 16, 16, 16)
    mapping = backquant.get_default_qconfig_mapping("onnxruntime")
    mapping.set_object_type(nn.Conv2d, None)
    quantized = backquant.quantize(
        model, backend="onnxruntime", calibration=[x], qconfig_mapping=mapping
    )
    path = tmp_path / "model.onnx"
    backquant.export(quantized, path, example_inputs=x, require=0.0)
    target = running_target("onnxruntime")
    assert target is not None
    times = target.session(path, threads=1).times([x.numpy()], rounds=2)
    assert {"_0", "_2", "_4"} <= times.keys()
    assert times.get("", 0.0) < 0.2 * sum(times.values())
