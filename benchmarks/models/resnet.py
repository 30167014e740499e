"""ResNet-18 and ResNet-50 (He et al., 2016), with the stride in the 3×3 convolution."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models.layers import ConvNormAct

__all__ = ["resnet18", "resnet50"]


class Block(nn.Module):
    """Two or three convolutions, added to the input (or to its projection)."""

    def __init__(self, main: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.main, self.shortcut, self.relu = main, shortcut, nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.main(x) + self.shortcut(x))


def shortcut_for(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return ConvNormAct((inputs, outputs), 1, stride, activation=None)


def basic(inputs: int, width: int, stride: int) -> tuple[Block, int]:
    main = nn.Sequential(
        ConvNormAct((inputs, width), 3, stride), ConvNormAct((width, width), 3, activation=None)
    )
    return Block(main, shortcut_for(inputs, width, stride)), width


def bottleneck(inputs: int, width: int, stride: int) -> tuple[Block, int]:
    outputs = 4 * width
    main = nn.Sequential(
        ConvNormAct((inputs, width), 1),
        ConvNormAct((width, width), 3, stride),
        ConvNormAct((width, outputs), 1, activation=None),
    )
    return Block(main, shortcut_for(inputs, outputs, stride)), outputs


class ResNet(nn.Module):
    def __init__(self, make: object, depths: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = ConvNormAct((3, 64), 7, 2)
        self.pool = nn.MaxPool2d(3, 2, 1)
        blocks: list[nn.Module] = []
        channels = 64
        for stage, depth in enumerate(depths):
            for index in range(depth):
                stride = 2 if stage and not index else 1
                block, channels = make(channels, 64 << stage, stride)  # type: ignore[operator]
                blocks.append(block)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(channels, 1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.pool(self.stem(x))))


def resnet18() -> nn.Module:
    return ResNet(basic, (2, 2, 2, 2))


def resnet50() -> nn.Module:
    return ResNet(bottleneck, (3, 4, 6, 3))
