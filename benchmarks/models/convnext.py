"""ConvNeXt-T (Liu et al., 2022)."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["convnext_tiny"]


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of an image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 3, 1)
        x = nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Permute(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(self.dims)


class Block(nn.Module):
    """Depthwise 7×7, norm, and two linear layers over the channels, scaled and added."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
            Permute(0, 2, 3, 1),
            nn.LayerNorm(channels, eps=1e-6),
            nn.Linear(channels, 4 * channels),
            nn.GELU(),
            nn.Linear(4 * channels, channels),
            Permute(0, 3, 1, 2),
        )
        # A trained scale; at its start of 1e-6 a block would do nothing that could be measured.
        self.scale = nn.Parameter(torch.full((channels, 1, 1), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.body(x)


def convnext_tiny() -> nn.Module:
    widths, depths = (96, 192, 384, 768), (3, 3, 9, 3)
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ChannelNorm(96, eps=1e-6)]
    for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
        if stage:
            before = widths[stage - 1]
            layers += [ChannelNorm(before, eps=1e-6), nn.Conv2d(before, width, 2, 2)]
        layers += [Block(width) for _ in range(depth)]
    layers += [
        nn.AdaptiveAvgPool2d(1),
        ChannelNorm(768, eps=1e-6),
        nn.Flatten(1),
        nn.Linear(768, 1000),
    ]
    return nn.Sequential(*layers)
