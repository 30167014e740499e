"""One operator each: models whose kernels are compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """``model()`` is called with tensors of ``shapes``."""

    name: str
    model: Callable[[], nn.Module]
    shapes: tuple[Shape, ...]


class Called(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Of one tensor."""
        return self.function(x)


class CalledTwo(Called):
    """A function of two tensors."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        """Of two tensors."""
        return self.function(x, y)


_IMAGE, _WIDE = (2, 6, 9, 7), (64, 64)


def _module(name: str, make: Callable[[], nn.Module], shape: Shape) -> Case:
    return Case(name, lambda: nn.Sequential(make()), (shape,))


def _two(name: str, function: Any, first: Shape = _WIDE, second: Shape = _WIDE) -> Case:
    return Case(name, lambda: CalledTwo(function), (first, second))


def _one(name: str, function: Any, shape: Shape = _WIDE) -> Case:
    return Case(name, lambda: Called(function), (shape,))


CASES: tuple[Case, ...] = (
    _module("conv2d", lambda: nn.Conv2d(6, 10, 3), _IMAGE),
    _module("conv2d strided", lambda: nn.Conv2d(6, 5, (3, 2), (2, 1), (1, 0), bias=False), _IMAGE),
    _module("conv2d dilated", lambda: nn.Conv2d(6, 5, 3, 1, 2, 2), _IMAGE),
    _module("conv2d 1 × 1", lambda: nn.Conv2d(6, 40, 1), _IMAGE),
    _module("conv2d + relu", lambda: nn.Sequential(nn.Conv2d(6, 5, 3), nn.ReLU()), _IMAGE),
    _module("depthwise", lambda: nn.Conv2d(6, 6, 3, padding=1, groups=6), _IMAGE),
    _module("depthwise, two each", lambda: nn.Conv2d(6, 12, 3, 2, groups=6), _IMAGE),
    _module("conv1d", lambda: nn.Conv1d(6, 8, 3, 2, 1), (2, 6, 15)),
    _module("conv3d", lambda: nn.Conv3d(3, 4, 2, 1, 1), (2, 3, 5, 4, 6)),
    _module("conv_transpose2d", lambda: nn.ConvTranspose2d(6, 5, 3, 2, 1, 1), _IMAGE),
    _module("linear", lambda: nn.Linear(64, 30), _WIDE),
    _module("linear of three axes", lambda: nn.Linear(16, 9, bias=False), (2, 5, 16)),
    _two("add", torch.add),
    _two("add, broadcast", torch.add, (4, 8, 16), (1, 8, 16)),
    _two("sub", torch.sub),
    _two("mul", torch.mul),
    _two("matmul", torch.matmul, (3, 8, 16), (3, 16, 5)),
    _two("maximum", torch.maximum),
    _two("minimum", torch.minimum),
    _two("cat", lambda x, y: torch.cat([x, y], 1)),
    _module("max_pool2d", lambda: nn.MaxPool2d(3, 2, 1), _IMAGE),
    _module("avg_pool2d", lambda: nn.AvgPool2d(3, 2), _IMAGE),
    _module("avg_pool2d, padded", lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), _IMAGE),
    _module("adaptive_avg_pool2d", lambda: nn.AdaptiveAvgPool2d(1), _IMAGE),
    _one("mean", lambda x: torch.mean(x, (2, 3)), _IMAGE),
    _module("sigmoid", nn.Sigmoid, _WIDE),
    _module("tanh", nn.Tanh, _WIDE),
    _module("gelu", nn.GELU, _WIDE),
    _module("hardswish", nn.Hardswish, _WIDE),
    _module("silu", nn.SiLU, _WIDE),
    _module("elu", nn.ELU, _WIDE),
    _one("leaky_relu", F.leaky_relu),
)
