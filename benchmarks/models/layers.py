"""Layers that several of the models share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["ConvNormAct", "SqueezeExcite", "multiple_of_8"]


class ConvNormAct(nn.Sequential):
    """Convolution without bias, batch norm, activation (or none), with ``same`` padding."""

    def __init__(
        self,
        channels: tuple[int, int],
        kernel: int = 3,
        stride: int = 1,
        groups: int = 1,
        activation: Callable[[], nn.Module] | None = nn.ReLU,
    ) -> None:
        conv = nn.Conv2d(*channels, kernel, stride, kernel // 2, groups=groups, bias=False)
        parts: list[nn.Module] = [conv, nn.BatchNorm2d(channels[1])]
        if activation is not None:
            parts.append(activation())
        super().__init__(*parts)


class SqueezeExcite(nn.Module):
    """Channels scaled by a gate that is computed from their means (Hu et al., 2018)."""

    def __init__(
        self,
        channels: int,
        squeezed: int,
        activation: Callable[[], nn.Module],
        gate: Callable[[], nn.Module],
    ) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.activation = activation()
        self.expand = nn.Conv2d(squeezed, channels, 1)
        self.gate = gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(self.expand(self.activation(self.reduce(self.pool(x)))))


def multiple_of_8(value: float) -> int:
    """The nearest multiple of 8 that is not smaller than nine tenths of ``value``."""
    rounded = max(8, int(value + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * value else rounded
