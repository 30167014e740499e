"""Operators by name, of which tests make models whose outputs they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Function = Callable[..., Any]


class Several(nn.Module):
    """Operators side by side: each reads the same value, and gives an output."""

    def __init__(self, functions: dict[str, Function]) -> None:
        super().__init__()
        self.named = functions
        self.parts = nn.ModuleDict({k: f for k, f in functions.items() if isinstance(f, nn.Module)})

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.parts[k](x) if k in self.parts else f(x) for k, f in self.named.items())


def _reflected() -> nn.Module:
    return nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")


IMAGES: dict[str, Function] = {
    "same": nn.Conv2d(4, 6, 3, padding=1),
    "one_side": nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "valid": nn.Conv2d(4, 6, (3, 1), stride=(1, 2), bias=False),
    "even": nn.Conv2d(4, 6, 4, padding="same"),
    "dilated": nn.Conv2d(4, 6, 3, dilation=2),
    "grouped": nn.Conv2d(4, 6, 3, groups=2, padding=1),
    "depthwise": nn.Conv2d(4, 8, 3, groups=4, stride=2),
    "reflected": _reflected(),
    "clamped": nn.Sequential(nn.Conv2d(4, 6, 1), nn.Hardtanh(-0.25, 0.4)),
    "relu6": nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU6()),
    "transposed": nn.ConvTranspose2d(4, 6, 4, 2, 1),
    "transposed_cut": nn.ConvTranspose2d(4, 6, 3, 2, 1, 1),
    "transposed_dilated": nn.ConvTranspose2d(4, 6, 3, dilation=2),
    "flattened": nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(252, 5)),
    "upscaled": nn.Sequential(nn.Conv2d(4, 8, 3), nn.PixelShuffle(2)),
    "over_channels": nn.Sequential(nn.Conv2d(4, 6, 3), nn.Softmax(1)),
}
POOLS: dict[str, Function] = {
    "largest": nn.MaxPool2d(3, 2, 1),
    "largest_ceil": nn.MaxPool2d(3, 2, ceil_mode=True),
    "average": nn.AvgPool2d(3, 2),
    "average_padded": nn.AvgPool2d(3, 2, 1),
    "whole": nn.AdaptiveAvgPool2d(1),
    "mean": lambda x: x.mean((2, 3)),
    "mean_of_channels": lambda x: x.mean(1),
    "nearest": nn.Upsample(scale_factor=2),
    "bilinear": nn.Upsample(scale_factor=2, mode="bilinear"),
    "corners": nn.Upsample(size=(17, 15), mode="bilinear", align_corners=True),
}
VALUES: dict[str, Function] = {
    "add": lambda x: x + x.flip(2),
    "add_number": lambda x: x + 3,
    "sub_relu": lambda x: torch.relu(x - x.flip(2)),
    "mul": lambda x: x * x.flip(3),
    "mul_number": lambda x: x * 0.3,
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "softmax": nn.Softmax(-1),
    "log_softmax": nn.LogSoftmax(-1),
    "gelu": nn.GELU(),
    "elu": nn.ELU(),
    "silu": nn.SiLU(),
    "hardswish": nn.Hardswish(),
    "hardsigmoid": nn.Hardsigmoid(),
    "leaky_relu": nn.LeakyReLU(0.1),
    "prelu": nn.PReLU(4),
    "clamp": lambda x: x.clamp(-0.5, 0.8),
    "maximum": lambda x: torch.maximum(x, x.flip(2)),
    "matmul": lambda x: x @ x.transpose(-1, -2),
}
MOVES: dict[str, Function] = {
    "cat": lambda x: torch.cat([x, x.flip(2)], 1),
    "stack": lambda x: torch.stack([x, x.flip(2)], 1),
    "split": lambda x: torch.split(x, [1, 3], 1)[1],
    "select": lambda x: x.select(1, 2),
    "pad": lambda x: F.pad(x, (1, 2, 0, 1), value=0.5),
    "pad_edges": lambda x: F.pad(x, (1, 2, 0, 1), mode="replicate"),
    "pad_around": lambda x: F.pad(x, (1, 2, 0, 1), mode="circular"),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "reshape": lambda x: x.transpose(1, 2).reshape(2, -1, 8),
    "reshape_as": lambda x: x.transpose(1, 2).reshape_as(x),
    "view_as": lambda x: x.transpose(1, 2).contiguous().view_as(x),
    "expand_as": lambda x: x[:1].expand_as(x),
    "unsqueeze": lambda x: x.permute(0, 2, 3, 1).unsqueeze(2),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "channel_shuffle": nn.ChannelShuffle(2),
}
IN_FLOAT: dict[str, Function] = {
    "less a multiple": lambda x: torch.rsub(x, 1, alpha=2),
    "layer_norm": nn.Sequential(nn.Conv2d(4, 6, 1), nn.LayerNorm([6, 9, 8])),
    "group_norm": nn.Sequential(nn.Conv2d(4, 6, 1), nn.GroupNorm(2, 6)),
    "instance_norm": nn.Sequential(nn.Conv2d(4, 6, 1), nn.InstanceNorm2d(6)),
    "counts": nn.Sequential(nn.Conv2d(4, 6, 1), nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
    "counts_ceil": nn.Sequential(nn.Conv2d(4, 6, 1), nn.AvgPool2d(2, 2, ceil_mode=True)),
    "windows": nn.Sequential(nn.Conv2d(4, 6, 1), nn.AdaptiveAvgPool2d((4, 3))),
    "largest_place": lambda x: x.argmax(1),
    "chosen": lambda x: torch.where(x > 0, x, x.flip(2)),
    "sums": lambda x: x.sum(1),
    "normalized": lambda x: F.normalize(x, dim=1),
    "slice": lambda x: x[:, 1:, ::2, -5:],
}
LINES: dict[str, Function] = {
    "line": nn.Conv1d(4, 6, 3, padding=1),
    "depthwise": nn.Conv1d(4, 4, 3, stride=2, padding=1, groups=4),
    "transposed": nn.ConvTranspose1d(4, 6, 4, 2, 1),
    "largest": nn.MaxPool1d(3, 2, 1),
    "average": nn.AvgPool1d(2),
    "linear": nn.Linear(12, 5),
}
