"""DenseNet-121 (Huang et al., 2017)."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["densenet121"]

GROWTH = 32


class DenseLayer(nn.Module):
    """Norm, ReLU, 1×1 and norm, ReLU, 3×3 over all earlier features of the block."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 4 * GROWTH, 1, bias=False),
            nn.BatchNorm2d(4 * GROWTH),
            nn.ReLU(),
            nn.Conv2d(4 * GROWTH, GROWTH, 3, padding=1, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.body(x)], 1)


def transition(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels // 2, 1, bias=False),
        nn.AvgPool2d(2, 2),
    )


def densenet121() -> nn.Module:
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for index, depth in enumerate((6, 12, 24, 16)):
        if index:
            layers.append(transition(channels))
            channels //= 2
        for _ in range(depth):
            layers.append(DenseLayer(channels))
            channels += GROWTH
    layers += [
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(1),
        nn.Linear(channels, 1000),
    ]
    return nn.Sequential(*layers)
