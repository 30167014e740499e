"""MobileNet-v2 (Sandler et al., 2018) and MobileNet-v3 large (Howard et al., 2019)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from benchmarks.models.layers import ConvNormAct, SqueezeExcite, multiple_of_8

__all__ = ["mobilenet_v2", "mobilenet_v3_large"]


class Inverted(nn.Module):
    """Expand, depthwise convolution, project; added to the input where shapes allow."""

    def __init__(self, parts: list[nn.Module], residual: bool) -> None:
        super().__init__()
        self.parts, self.residual = nn.Sequential(*parts), residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.parts(x) if self.residual else self.parts(x)


def v2_block(inputs: int, outputs: int, stride: int, expansion: int) -> Inverted:
    hidden = inputs * expansion
    parts: list[nn.Module] = []
    if expansion != 1:
        parts.append(ConvNormAct((inputs, hidden), 1, activation=nn.ReLU6))
    parts += [
        ConvNormAct((hidden, hidden), 3, stride, hidden, nn.ReLU6),
        ConvNormAct((hidden, outputs), 1, activation=None),
    ]
    return Inverted(parts, stride == 1 and inputs == outputs)


def mobilenet_v2() -> nn.Module:
    # expansion, channels, repeats, stride
    stages = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    layers: list[nn.Module] = [ConvNormAct((3, 32), 3, 2, activation=nn.ReLU6)]
    channels = 32
    for expansion, outputs, repeats, stride in stages:
        for index in range(repeats):
            step = 1 if index else stride
            layers.append(v2_block(channels, outputs, step, expansion))
            channels = outputs
    layers += [
        ConvNormAct((channels, 1280), 1, activation=nn.ReLU6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(1),
        nn.Dropout(0.2),
        nn.Linear(1280, 1000),
    ]
    return nn.Sequential(*layers)


Row = tuple[int, int, int, bool, Callable[[], nn.Module], int]


def v3_block(inputs: int, row: Row) -> Inverted:
    kernel, hidden, outputs, squeeze, activation, stride = row
    parts: list[nn.Module] = []
    if hidden != inputs:
        parts.append(ConvNormAct((inputs, hidden), 1, activation=activation))
    parts.append(ConvNormAct((hidden, hidden), kernel, stride, hidden, activation))
    if squeeze:
        gate = SqueezeExcite(hidden, multiple_of_8(hidden / 4), nn.ReLU, nn.Hardsigmoid)
        parts.append(gate)
    parts.append(ConvNormAct((hidden, outputs), 1, activation=None))
    return Inverted(parts, stride == 1 and inputs == outputs)


def mobilenet_v3_large() -> nn.Module:
    relu, swish = nn.ReLU, nn.Hardswish
    # kernel, hidden channels, channels, squeeze and excite, activation, stride
    rows: tuple[Row, ...] = (
        (3, 16, 16, False, relu, 1),
        (3, 64, 24, False, relu, 2),
        (3, 72, 24, False, relu, 1),
        (5, 72, 40, True, relu, 2),
        (5, 120, 40, True, relu, 1),
        (5, 120, 40, True, relu, 1),
        (3, 240, 80, False, swish, 2),
        (3, 200, 80, False, swish, 1),
        (3, 184, 80, False, swish, 1),
        (3, 184, 80, False, swish, 1),
        (3, 480, 112, True, swish, 1),
        (3, 672, 112, True, swish, 1),
        (5, 672, 160, True, swish, 2),
        (5, 960, 160, True, swish, 1),
        (5, 960, 160, True, swish, 1),
    )
    layers: list[nn.Module] = [ConvNormAct((3, 16), 3, 2, activation=swish)]
    channels = 16
    for row in rows:
        layers.append(v3_block(channels, row))
        channels = row[2]
    layers += [
        ConvNormAct((channels, 960), 1, activation=swish),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(1),
        nn.Linear(960, 1280),
        swish(),
        nn.Dropout(0.2),
        nn.Linear(1280, 1000),
    ]
    return nn.Sequential(*layers)
