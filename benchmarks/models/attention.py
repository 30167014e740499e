"""Attention written with linear layers, so that each can be quantized."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["FusedAttention", "SeparateAttention", "mlp"]


class FusedAttention(nn.Module):
    """Queries, keys and values from one linear layer. Takes ``[batch, tokens, width]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.depth = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.heads, self.depth)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class SeparateAttention(nn.Module):
    """Queries, keys and values from a linear layer each. Takes ``[batch, tokens, width]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.depth = heads, width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        shape = (batch, tokens, self.heads, self.depth)
        query = self.query(x).reshape(shape).transpose(1, 2)
        key = self.key(x).reshape(shape).transpose(1, 2)
        value = self.value(x).reshape(shape).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


def mlp(width: int, hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
