"""Models that were trained with fake quantization are exported as any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import backquant


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(288, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.head(self.stem(x).flatten(1)))


@pytest.mark.filterwarnings("ignore:1 operators stay float:UserWarning")  # the dropout at the end
@pytest.mark.parametrize(
    ("backend", "name"), [("onnxruntime", "m.onnx"), ("openvino", "m.xml"), ("xnnpack", "m.pte")]
)
def test_a_trained_model(backend: str, name: str, tmp_path: Path) -> None:
    x = torch.randn(4, 3, 8, 8)
    prepared = backquant.prepare_qat_fx(
        Net(),
        backquant.get_default_qat_qconfig_mapping(backend),
        x,
        backend_config=backquant.get_backend_config(backend),
    )
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        prepared(torch.randn(4, 3, 8, 8)).square().sum().backward()
        optimizer.step()
    prepared.apply(backquant.disable_observer)
    quantized = backquant.convert_fx(prepared.eval())
    exported = backquant.export(quantized, tmp_path / name, example_inputs=x)
    assert exported.integer_share == 1.0
