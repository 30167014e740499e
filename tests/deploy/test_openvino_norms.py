"""Norms of small values that were integers: OpenVINO takes their scale behind the norm."""

from __future__ import annotations

from pathlib import Path

import onnx_ir
import openvino
import pytest
import torch
from torch import nn

import backquant
from backquant.deploy.openvino.norms import keep_scales_before_norms


class Normed(nn.Module):
    """As in xLSTM: the product that it norms has a deviation near the root of epsilon."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.one, self.other, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.one(x) @ (self.other(x) * 1e-3).transpose(1, 2)
        return self.norm(y.reshape(-1, 8))


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 8), nn.LayerNorm(8)], ids=["group", "layer"])
def test_epsilon_is_kept(norm: nn.Module, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, net = torch.randn(4, 8, 16), Normed(norm).eval()
    model = backquant.quantize(net, backend="openvino", calibration=[x], slower="keep")
    path = tmp_path / "m.xml"
    backquant.export(model, path, example_inputs=x)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = openvino.Core().compile_model(str(path), "CPU", settings)
    wanted, found = model(x), torch.from_numpy(compiled(x.numpy())[0].copy())
    assert (found - wanted).norm() < 0.02 * wanted.norm()


def test_norms_of_floats_are_left_alone() -> None:
    x = onnx_ir.val("x", onnx_ir.DataType.FLOAT, [2, 4, 8])
    added = onnx_ir.node("Add", [x, x])
    added.outputs[0].dtype = onnx_ir.DataType.FLOAT
    norm = onnx_ir.node("LayerNormalization", [added.outputs[0], x])
    graph = onnx_ir.Graph([x], norm.outputs, nodes=[added, norm], opset_imports={"": 18})
    keep_scales_before_norms(onnx_ir.Model(graph, ir_version=10))
    assert [node.op_type for node in graph] == ["Add", "LayerNormalization"]
