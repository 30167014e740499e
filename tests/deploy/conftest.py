"""Small quantized models, one per backend, made once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

import backquant
from backquant.runtime import QuantizedModel


class Residual(nn.Module):
    """Two convolutions, a residual addition, pooling and a linear layer: each kind of kernel once."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Conv2d(8, 8, 3, padding=1)
        self.clip = nn.ReLU6()
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.relu(x + self.clip(self.body(x)))
        return self.fc(torch.flatten(self.mean(self.pool(x)), 1))


def batches(*shape: int, count: int = 2, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for _ in range(count)]


@cache
def _residual(backend: str) -> QuantizedModel:
    torch.manual_seed(0)
    return backquant.quantize(Residual().eval(), backend=backend, calibration=batches(4, 3, 16, 16))


@pytest.fixture
def residual() -> Callable[[str], QuantizedModel]:
    return _residual
