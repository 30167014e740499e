"""Swin-T (Liu et al., 2021) for 224×224: windows and shifts are fixed when it is built."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.models.attention import mlp

__all__ = ["swin_t"]

WINDOW = 7


def relative_positions(window: int) -> torch.Tensor:
    """For each pair of positions in a window, the row of the bias table: ``[window² · window²]``."""
    rows, columns = torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
    flat = torch.stack([rows.flatten(), columns.flatten()])
    apart = flat[:, :, None] - flat[:, None, :] + window - 1
    return (apart[0] * (2 * window - 1) + apart[1]).flatten()


def shift_mask(size: int, window: int, shift: int) -> torch.Tensor:
    """-100 between positions that a shift brought into one window: ``[windows, 1, w², w²]``."""
    region = torch.zeros(size, size)
    edges = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for row, down in enumerate(edges):
        for column, across in enumerate(edges):
            region[down, across] = row * 3 + column
    count = size // window
    parts = region.view(count, window, count, window).permute(0, 2, 1, 3).reshape(-1, window**2)
    apart = parts[:, None, :] != parts[:, :, None]
    return torch.zeros(apart.shape).masked_fill(apart, -100.0)[:, None]


class WindowAttention(nn.Module):
    """Attention inside windows, shifted or not. Takes ``[batch, size, size, width]``."""

    def __init__(self, width: int, heads: int, size: int, shift: int) -> None:
        super().__init__()
        self.heads, self.depth, self.width = heads, width // heads, width
        self.count, self.size, self.shift = size // WINDOW, size, shift
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn((2 * WINDOW - 1) ** 2, heads) * 0.02)
        self.register_buffer("positions", relative_positions(WINDOW))
        mask = shift_mask(size, WINDOW, shift) if shift else torch.zeros(1, 1, 1, 1)
        self.register_buffer("mask", mask)
        self.softmax = nn.Softmax(-1)

    def windows(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, self.count, WINDOW, self.count, WINDOW, self.width)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, WINDOW**2, self.width)

    def image(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, self.count, self.count, WINDOW, WINDOW, self.width)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.size, self.size, self.width)

    def scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        squared = WINDOW**2
        bias = self.bias[self.positions].view(squared, squared, self.heads).permute(2, 0, 1)
        scores = torch.matmul(query, key.transpose(-2, -1)) + bias.unsqueeze(0)
        if not self.shift:
            return scores
        apart = scores.view(-1, self.count**2, self.heads, squared, squared)
        return (apart + self.mask).view(-1, self.heads, squared, squared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        qkv = self.qkv(self.windows(x)).reshape(-1, WINDOW**2, 3, self.heads, self.depth)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        weights = self.softmax(self.scores(query * self.depth**-0.5, key))
        mixed = torch.matmul(weights, value).transpose(1, 2).reshape(-1, WINDOW**2, self.width)
        x = self.image(self.out(mixed))
        return torch.roll(x, (self.shift, self.shift), (1, 2)) if self.shift else x


class Block(nn.Module):
    def __init__(self, width: int, heads: int, size: int, shift: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = WindowAttention(width, heads, size, shift)
        self.mlp = mlp(width, 4 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Merge(nn.Module):
    """Each 2×2 patch of tokens to one of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.reduce = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        even, odd = x[:, 0::2], x[:, 1::2]
        parts = [even[:, :, 0::2], odd[:, :, 0::2], even[:, :, 1::2], odd[:, :, 1::2]]
        return self.reduce(self.norm(torch.cat(parts, -1)))


class Swin(nn.Module):
    def __init__(self, width: int, depths: tuple[int, ...], heads: tuple[int, ...]) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.norm = nn.LayerNorm(width)
        layers: list[nn.Module] = []
        size = 56
        for stage, (depth, count) in enumerate(zip(depths, heads, strict=True)):
            if stage:
                layers.append(Merge(width))
                width, size = 2 * width, size // 2
            for index in range(depth):
                shift = WINDOW // 2 if index % 2 and size > WINDOW else 0
                layers.append(Block(width, count, size, shift))
        self.layers = nn.Sequential(*layers)
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.patches(x).permute(0, 2, 3, 1))
        return self.head(self.last(self.layers(x)).mean((1, 2)))


def swin_t() -> nn.Module:
    return Swin(96, (2, 2, 6, 2), (3, 6, 12, 24))
