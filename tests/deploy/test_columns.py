"""Convolutions along a column of one pixel are written along a line: the same sums, on integers as before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import QDQRules
from backquant.deploy.job_of import lay_columns
from backquant.deploy.portable import portable
from backquant.lower.qdq import is_dequantize, is_quantize


class Columns(nn.Module):
    """With an activation behind, padded in groups, one that is called twice, and one on three pixels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(1, 16, (96, 1), (4, 1))
        self.padded = nn.Conv2d(16, 16, (5, 1), (2, 1), (3, 0), (2, 1), groups=2)
        self.twice = nn.Conv2d(16, 16, (3, 1), padding=(1, 0))
        self.wide = nn.Conv2d(16, 8, (5, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.padded(torch.relu(self.first(x))))
        x = torch.relu(self.twice(torch.relu(self.twice(x))))
        return self.wide(x.expand(-1, -1, -1, 3))


X = torch.randn(2, 1, 300, 1, generator=torch.Generator().manual_seed(1))


def quantized(backend: str) -> Any:
    model = Columns().eval()
    return backquant.quantize(model, backend=backend, calibration=[X], slower="keep", recipe="none")


def kernels(module: Any) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(part.weight.shape[2:])
        for name, part in module.named_modules()
        if isinstance(part, nn.Conv2d)
    }


@pytest.mark.parametrize("rule", ["lines", "integer_lines"])
def test_the_graph_computes_the_same(rule: str) -> None:
    reference = quantized("onnxruntime").graph_module
    made = portable(reference, QDQRules())
    names = [node.name for node in made.graph.nodes if node.op == "call_module"]
    lay_columns(made, (X,), {}, rule)
    assert [node.name for node in made.graph.nodes if node.op == "call_module"] == names
    sizes = sorted(kernels(made).values())
    assert sizes == [(1, 3), (1, 5), (1, 96), (5, 1)]
    assert sorted(kernels(reference).values()) == [(3, 1), (5, 1), (5, 1), (96, 1)]
    step = 2 * (wanted := reference(X)).abs().max() / 255
    assert made(X).shape == wanted.shape and (made(X) - wanted).abs().max() <= step
    for node in made.graph.find_nodes(op="call_function", target=torch.transpose):
        inner = is_quantize(node.args[0]) or node.args[0].op == "placeholder"
        assert rule == "lines" or inner or not is_dequantize(node.args[0])


def test_columns_stay_where_nothing_is_gained() -> None:
    made = portable(quantized("onnxruntime").graph_module, QDQRules())
    before = [node.format_node() for node in made.graph.nodes]
    lay_columns(made, (X.expand(-1, -1, -1, 3),), {})  # three pixels wide
    assert [node.format_node() for node in made.graph.nodes] == before


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("onnxruntime", "m.onnx"),
        ("openvino", "m.xml"),
        pytest.param("inductor_x86", "m.pt2", marks=pytest.mark.xdist_group("compiled")),
    ],
)
def test_runtimes_compute_the_same_on_integers(backend: str, name: str, tmp_path: Path) -> None:
    model = quantized(backend)
    exported = backquant.export(model, tmp_path / name, example_inputs=X)
    assert exported.integer_share == pytest.approx(1.0)
    found = run(tmp_path / name)
    wanted = model(X)
    assert float((found - wanted).norm() / wanted.norm()) < 0.02


def run(path: Path) -> torch.Tensor:
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path))
        return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: X.numpy()})[0])
    if path.suffix == ".xml":
        import openvino

        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
        compiled = openvino.Core().compile_model(str(path), "CPU", settings)
        return torch.from_numpy(compiled(X.numpy())[0].copy())
    made: torch.Tensor = torch._inductor.aoti_load_package(str(path))(X)
    return made
