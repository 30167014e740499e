"""Weights as rows that a quadratic form judges, and the grid of integers that they are rounded to.

A layer computes ``W x``. With ``H = mean(x x^T)`` over its inputs, the mean squared error that a change ``D``
of the weight makes at its output is ``tr(D H D^T)``; each row (output channel) has its own part of it.
Tensors are ``(groups, rows, columns)``: groups of a convolution, output channels of a group, their inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Grid", "columns", "gram", "positions", "quadratic"]

_WINDOWS = 1 << 24  # values in windows of inputs, at most, at once
_WIDE = 512  # columns


@dataclass(frozen=True)
class Grid:
    """The values that each weight may have: ``(q - zero_point) * scale``, ``low <= q <= high``.

    ``scale`` and ``zero_point`` have the shape of the weight, or one that spreads over it.

    >>> grid = Grid(torch.tensor(0.5), torch.tensor(0.0), -2, 1)
    >>> grid.nearest(torch.tensor([0.3, -9.0, 9.0]))
    tensor([ 0.5000, -1.0000,  0.5000])
    """

    scale: Tensor
    zero_point: Tensor
    low: int
    high: int

    def nearest(self, weight: Tensor) -> Tensor:
        """Rounded to the nearest."""
        steps = torch.round(weight / self.scale + self.zero_point)
        return (steps.clamp(self.low, self.high) - self.zero_point) * self.scale

    def floor(self, weight: Tensor) -> Tensor:
        """The integers below, so that they and those above are in the range."""
        steps = torch.floor(weight / self.scale + self.zero_point)
        return steps.clamp(self.low, self.high - 1)

    def values(self, steps: Tensor) -> Tensor:
        """What integers stand for."""
        return (steps.clamp(self.low, self.high) - self.zero_point) * self.scale

    def spread(self, shape: torch.Size) -> Grid:
        """The same with a scale for each weight."""
        return replace(
            self, scale=self.scale.expand(shape), zero_point=self.zero_point.expand(shape)
        )


def quadratic(change: Tensor, hessian: Tensor) -> Tensor:
    """The loss of a change of the weight, by row: ``(groups, rows)``.

    >>> quadratic(torch.tensor([[[1.0, 2.0]]]), torch.eye(2)[None])
    tensor([[5.]])
    """
    return ((change @ hessian) * change).sum(-1)


def columns(weight: Tensor, groups: int) -> Tensor:
    """The weight of a linear layer or a convolution as ``(groups, rows, columns)``.

    >>> columns(torch.zeros(8, 3, 5, 5), 2).shape
    torch.Size([2, 4, 75])
    """
    return weight.reshape(groups, weight.shape[0] // groups, -1)


def mean_error(wrong: Tensor, means: Tensor, groups: int) -> Tensor:
    """The mean error of each output channel, by what is wrong with each weight and the means of what channels
    read: ``(rows,)``, in float64.

    >>> mean_error(torch.tensor([[0.5, 0.0], [0.0, 0.25]]), torch.tensor([1.0, 2.0]), 1).tolist()
    [0.5, 0.5]
    """
    taps = wrong[0, 0].numel()
    read = means.to(wrong.dtype).repeat_interleave(taps).reshape(groups, -1, 1)
    return (columns(wrong, groups) @ read).flatten().double()


def gram(layer: nn.Module, x: Tensor, most: int | None = None) -> tuple[Tensor, int]:
    """The sum of ``x x^T`` over all positions that a weight meets, float32 ``(groups, columns, columns)``,
    and how many there were.

    ``layer``: ``nn.Linear``, or a convolution that is not transposed. ``most``: positions; of more, about as
    many are taken, evenly spread along each axis of a convolution.

    >>> found, count = gram(nn.Linear(2, 1), torch.tensor([[1.0, 2.0]]))
    >>> found.tolist(), count
    ([[[1.0, 2.0], [2.0, 4.0]]], 1)
    """
    total, count = None, 0
    step = _step(layer, x, most)
    for part in _parts(layer, x):
        rows = positions(layer, part, step)
        found = _products(rows)
        total, count = found if total is None else total.add_(found), count + rows.shape[1]
    assert total is not None
    return total, count


def _step(layer: nn.Module, x: Tensor, most: int | None) -> int:
    """Every how-manieth position is taken, along each axis that a convolution slides along."""
    if most is None:
        return 1
    if isinstance(layer, nn.Linear):
        return max(1, x.numel() // max(1, x.shape[-1]) // most)
    stride: Any = layer.stride
    there = x.numel() / max(1, layer.in_channels * math.prod(stride))
    return max(1, int((there / most) ** (1 / len(stride))))


def _products(rows: Tensor) -> Tensor:
    """``rows^T rows`` for each group; of wide ones what is below the diagonal is copied."""
    width = rows.shape[-1]
    if width <= _WIDE:
        return rows.transpose(1, 2) @ rows
    found = rows.new_empty(len(rows), width, width)
    for start in range(0, width, _WIDE):
        end = min(start + _WIDE, width)
        torch.bmm(
            rows[..., start:end].transpose(1, 2), rows[..., start:], out=found[:, start:end, start:]
        )
        found[:, end:, start:end] = found[:, start:end, end:].transpose(1, 2)
    return found


def _parts(layer: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """A batch of a convolution in so few samples that what its windows hold fits."""
    kernel = getattr(layer, "kernel_size", None)
    if kernel is None or x.dim() < len(kernel) + 2:
        return (x,)
    windows = max(1, x[:1].numel() * math.prod(kernel))
    parts: tuple[Tensor, ...] = x.split(max(1, _WINDOWS // windows))
    return parts


def positions(layer: nn.Module, x: Tensor, step: int = 1) -> Tensor:
    """What each weight meets: ``(groups, positions, columns)``; of every ``step``-th position along each axis
    of a convolution, or of the rows of a linear layer."""
    if isinstance(layer, nn.Linear):
        return x.reshape(1, -1, x.shape[-1])[:, step // 2 :: step].float()
    assert isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    dimensions = len(layer.kernel_size)
    x = x.float() if x.dim() == dimensions + 2 else x.float()[None]
    padding = layer._reversed_padding_repeated_twice
    if isinstance(layer.padding, str) or any(layer.padding):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = nn.functional.pad(x, padding, mode=mode)
    for axis in range(dimensions):  # each spatial axis gives a window axis at the end
        reach = layer.dilation[axis] * (layer.kernel_size[axis] - 1) + 1
        x = x.unfold(2 + axis, reach, layer.stride[axis])
        first = min(step // 2, x.shape[2 + axis] - 1)
        x = x[(slice(None),) * (2 + axis) + (slice(first, None, step),)]
    for axis in range(dimensions):
        window = x.dim() - dimensions + axis
        taps = torch.arange(layer.kernel_size[axis], device=x.device) * layer.dilation[axis]
        x = x.index_select(window, taps)
    groups, channels = layer.groups, layer.in_channels // layer.groups
    batch, spatial = x.shape[0], x.shape[2 : 2 + dimensions]
    x = x.reshape(batch, groups, channels, spatial.numel(), -1)
    return x.permute(1, 0, 3, 2, 4).reshape(groups, batch * spatial.numel(), -1)
