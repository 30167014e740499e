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
