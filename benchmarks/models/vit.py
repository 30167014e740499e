"""ViT-B/16 (Dosovitskiy et al., 2021)."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models.attention import FusedAttention, mlp

__all__ = ["vit_b_16"]


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.attention = FusedAttention(width, heads)
        self.mlp = mlp(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, width: int, heads: int, depth: int, size: int, patch: int) -> None:
        super().__init__()
        tokens = (size // patch) ** 2 + 1
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.position = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        self.layers = nn.Sequential(*(EncoderLayer(width, heads, 4 * width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.size(0), -1, -1), x], 1) + self.position
        return self.head(self.norm(self.layers(x))[:, 0])


def vit_b_16() -> nn.Module:
    return VisionTransformer(width=768, heads=12, depth=12, size=224, patch=16)
