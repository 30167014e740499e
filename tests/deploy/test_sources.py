"""What can be exported: reference models, trained models, models captured by torch.export."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import ExportError, UsageError


def trained() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))


def test_a_trained_model(tmp_path) -> None:
    config = backquant.get_backend_config("onnxruntime")
    mapping = backquant.get_default_qat_qconfig_mapping(config)
    x = torch.randn(2, 3, 8, 8)
    prepared = backquant.prepare_qat_fx(trained().train(), mapping, x, backend_config=config)
    optimizer = torch.optim.SGD(prepared.parameters(), 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        prepared(x).square().mean().backward()
        optimizer.step()
    quantized = backquant.convert_fx(prepared.eval())
    exported = backquant.export(
        quantized, tmp_path / "m.onnx"
    )  # on inputs as those of prepare_qat_fx
    assert exported.integer == exported.expected == 2
    quantized.record = replace(quantized.record, example=None)
    with pytest.raises(UsageError, match="example inputs are needed"):
        backquant.export(quantized, tmp_path / "n.onnx")


def test_a_reference_model_in_either_dialect(tmp_path) -> None:
    config = backquant.get_backend_config("onnxruntime")
    mapping = backquant.get_default_qconfig_mapping(config)
    x = torch.randn(2, 3, 8, 8)
    prepared = backquant.prepare_fx(trained().eval(), mapping, x, backend_config=config)
    prepared(x)
    plain = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
    assert backquant.export(plain, tmp_path / "m.onnx", example_inputs=x).integer == 2
    other = backquant.convert_to_reference_fx(prepared)
    with pytest.raises(UsageError, match="is in the dialect 'quantized_tensor'"):
        backquant.export(other, tmp_path / "n.onnx", example_inputs=x)


def test_the_model_is_not_changed(residual, tmp_path) -> None:
    model = residual("onnxruntime")
    before = {
        name: tensor.clone() for name, tensor in model.state_dict().items() if tensor is not None
    }
    graph = str(model.graph_module.graph)
    backquant.export(model, tmp_path / "m.onnx")
    assert str(model.graph_module.graph) == graph
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_a_model_on_another_device_is_refused(residual, tmp_path) -> None:
    model = copy.deepcopy(residual("onnxruntime")).to("meta")
    with pytest.raises(
        ExportError, match=r"the model is on meta, and onnx is written from the CPU"
    ):
        backquant.export(model, tmp_path / "m.onnx")


class Untraceable(nn.Module):
    """A branch on a value's shape that symbolic tracing cannot take."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 4:
            x = torch.relu(self.fc(x))
        return self.out(x)


def test_a_model_captured_by_torch_export(tmp_path) -> None:
    x = torch.randn(4, 8)
    quantized = backquant.quantize(Untraceable().eval(), backend="onnxruntime", calibration=[x])
    exported = backquant.export(quantized, tmp_path / "m.onnx")
    assert exported.integer == exported.expected >= 2
    assert exported.integer_share == 1.0
