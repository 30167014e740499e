from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import BackendConfig
from backquant.match.plan import Plan
from backquant.qconfig import QConfigMapping
from backquant.runtime import LoweredRecord, QuantizedModel


class SmallNet(nn.Module):
    """Convolutions with batch norm, an addition, pooling, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn(self.conv1(x)))
        x = x + self.conv2(x)
        return self.fc(torch.flatten(self.pool(x), 1))


@pytest.fixture
def image() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8)


@pytest.fixture
def quantized(image: torch.Tensor) -> QuantizedModel:
    return backquant.quantize(SmallNet(), backend="x86", calibration=[image])


@pytest.fixture
def wrapped() -> Callable[[nn.Module], QuantizedModel]:
    """A traced float module in a ``QuantizedModel``, so that anything can be put into a file."""

    def wrap(module: nn.Module) -> QuantizedModel:
        graph_module = torch.fx.symbolic_trace(module.eval())
        record = LoweredRecord(Plan("x86"), BackendConfig("x86"), QConfigMapping())
        return QuantizedModel(graph_module, record)

    return wrap


@pytest.fixture
def round_trip(tmp_path: Path) -> Callable[..., QuantizedModel]:
    """Save and load; ``allow`` for both."""

    def again(model: QuantizedModel, allow: Any = ()) -> QuantizedModel:
        backquant.save(model, tmp_path / "model.bq", allow=allow)
        return backquant.load(tmp_path / "model.bq", allow=allow)

    return again
