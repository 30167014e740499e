"""EfficientNet-B0 (Tan and Le, 2019)."""

from __future__ import annotations

from torch import nn

from benchmarks.models.layers import ConvNormAct, SqueezeExcite
from benchmarks.models.mobilenet import Inverted

__all__ = ["efficientnet_b0"]


def block(inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> Inverted:
    hidden = inputs * expansion
    parts: list[nn.Module] = []
    if expansion != 1:
        parts.append(ConvNormAct((inputs, hidden), 1, activation=nn.SiLU))
    parts += [
        ConvNormAct((hidden, hidden), kernel, stride, hidden, nn.SiLU),
        SqueezeExcite(hidden, max(1, inputs // 4), nn.SiLU, nn.Sigmoid),
        ConvNormAct((hidden, outputs), 1, activation=None),
    ]
    return Inverted(parts, stride == 1 and inputs == outputs)


def efficientnet_b0() -> nn.Module:
    # expansion, kernel, stride, channels, repeats
    stages = (
        (1, 3, 1, 16, 1),
        (6, 3, 2, 24, 2),
        (6, 5, 2, 40, 2),
        (6, 3, 2, 80, 3),
        (6, 5, 1, 112, 3),
        (6, 5, 2, 192, 4),
        (6, 3, 1, 320, 1),
    )
    layers: list[nn.Module] = [ConvNormAct((3, 32), 3, 2, activation=nn.SiLU)]
    channels = 32
    for expansion, kernel, stride, outputs, repeats in stages:
        for index in range(repeats):
            step = 1 if index else stride
            layers.append(block(channels, outputs, kernel, step, expansion))
            channels = outputs
    layers += [
        ConvNormAct((channels, 1280), 1, activation=nn.SiLU),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(1),
        nn.Dropout(0.2),
        nn.Linear(1280, 1000),
    ]
    return nn.Sequential(*layers)
