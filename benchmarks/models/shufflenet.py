"""ShuffleNet-v2 ×1.0 (Ma et al., 2018)."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models.layers import ConvNormAct

__all__ = ["shufflenet_v2_x1_0"]


def shuffled(x: torch.Tensor) -> torch.Tensor:
    """The channels of the two halves in turn."""
    batch, channels, height, width = x.shape
    x = x.view(batch, 2, channels // 2, height, width)
    return torch.transpose(x, 1, 2).reshape(batch, channels, height, width)


def branch(inputs: int, outputs: int, stride: int) -> nn.Module:
    return nn.Sequential(
        ConvNormAct((inputs, outputs), 1),
        ConvNormAct((outputs, outputs), 3, stride, outputs, None),
        ConvNormAct((outputs, outputs), 1),
    )


class Unit(nn.Module):
    """Half of the channels go through, half through a branch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.right = branch(channels // 2, channels // 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, 1)
        return shuffled(torch.cat([left, self.right(right)], 1))


class Down(nn.Module):
    """All channels go through two branches of stride 2."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        half = outputs // 2
        self.left = nn.Sequential(
            ConvNormAct((inputs, inputs), 3, 2, inputs, None), ConvNormAct((inputs, half), 1)
        )
        self.right = branch(inputs, half, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return shuffled(torch.cat([self.left(x), self.right(x)], 1))


def shufflenet_v2_x1_0() -> nn.Module:
    layers: list[nn.Module] = [ConvNormAct((3, 24), 3, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 24
    for outputs, repeats in ((116, 4), (232, 8), (464, 4)):
        layers.append(Down(channels, outputs))
        layers += [Unit(outputs) for _ in range(repeats - 1)]
        channels = outputs
    layers += [
        ConvNormAct((channels, 1024), 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(1),
        nn.Linear(1024, 1000),
    ]
    return nn.Sequential(*layers)
