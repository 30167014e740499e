"""Norms of small values that were integers: OpenVINO takes their scale behind the norm."""

from __future__ import annotations

from pathlib import Path

import onnx_ir
import openvino
import pytest
import torch
from torch import nn

import backquant
from backquant.deploy.openvino.workarounds import keep_scales_before_norms


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


class Pooled(nn.Module):
    """Tokens whose sums and means stand beside a layer that reads them as integers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.eye_(self.one.weight)  # no sums that overflow where the CPU has no VNNI
        nn.init.eye_(self.other.weight)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        y = self.one(x)
        return [self.other(y), y.mean(1), y.sum(1, keepdim=True), y.sum((1, 2)), y.mean(-1)]


def test_sums_over_tokens_are_right_in_every_sample(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, path = torch.randn(4, 6, 8), tmp_path / "m.xml"
    model = backquant.quantize(Pooled().eval(), backend="openvino", calibration=[x, 2 * x])
    backquant.export(model, path, example_inputs=x, dynamic_shapes={"x": {0: "batch"}})
    compiled = openvino.Core().compile_model(str(path), "CPU")
    for batch in (4, 9, 2):
        x = torch.randn(batch, 6, 8)
        results = compiled([x.numpy()])
        for wanted, output in zip(model(x), compiled.outputs, strict=True):
            error = (torch.from_numpy(results[output].copy()) - wanted).norm()
            assert error < 0.01 * wanted.norm()
