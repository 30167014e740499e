"""A small network with what accuracy tools have to get right: residual, shared observer, float layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.accuracy.calibrated import Calibrated
from backquant.api.flow import Flow, Options
from backquant.runtime import QuantizedModel


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.pool = nn.Conv2d(8, 8, 3, padding=1), nn.MaxPool2d(2)
        self.fc, self.norm = nn.Linear(16, 10), nn.LayerNorm(10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x) + x))
        return self.norm(self.fc(x.mean(1).flatten(1)))


@dataclass
class Case:
    model: nn.Module
    data: list[torch.Tensor]
    ready: Calibrated
    quantized: QuantizedModel


@pytest.fixture(scope="package")
def cases() -> dict[str, Case]:
    torch.manual_seed(0)
    model = Block().eval()
    data = [torch.randn(8, 3, 8, 8) for _ in range(3)]
    made: dict[str, Case] = {}
    for capture in ("trace", "export"):
        call = Flow(Options("x86", capture=capture))
        arguments: dict[str, Any] = {"calibration": data, "slower": "keep", "capture": capture}
        made[capture] = Case(
            model, data, call.calibrated(model, None, data), backquant.quantize(model, **arguments)
        )
    return made
