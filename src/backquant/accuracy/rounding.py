"""Rounding weights so that the output of their layer changes least: GPTQ, AdaRound, clipped scales.

All judge by ``quadratic``, with the mean of ``x x^T`` of the layer's inputs, row by row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Grid", "columns", "gram", "positions", "quadratic"]


# Weights as rows that a quadratic form judges, and the grid of integers that they are rounded to.
#
# A layer computes ``W x``. With ``H = mean(x x^T)`` over its inputs, the mean squared error that a change
# ``D`` of the weight makes at its output is ``tr(D H D^T)``; each row (output channel) has its own part of
# it. Tensors are ``(groups, rows, columns)``: groups of a convolution, output channels of a group, their
# inputs.

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


_BLOCK = 128
_FAR = 3.0  # times the least loss
_SHRINK = (1.0, *(1 - 0.04 * step for step in range(1, 16)))  # of a scale, down to 0.4


def gptq(weight: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
    """Column by column to the nearest, each error made up for by the columns that come after. Columns with
    the largest inputs come first, while there are many to make up for their errors.

    Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
    Transformers", 2022 (arXiv 2210.17323), algorithm 1, with the grid fixed beforehand, and columns in the
    order of the diagonal of ``hessian``.

    Args:
        weight: ``(groups, rows, columns)``.
        hessian: ``(groups, columns, columns)``, of the inputs.

    With a diagonal ``hessian`` nothing can be made up for, and it rounds to the nearest:

    >>> weight, grid = torch.tensor([[[0.2, 0.7]]]), Grid(torch.tensor(1.0), torch.tensor(0.0), -8, 7)
    >>> gptq(weight, torch.eye(2)[None], grid)
    tensor([[[0., 1.]]])
    """
    order = hessian.diagonal(dim1=-2, dim2=-1).argsort(dim=-1, descending=True, stable=True)
    grid = grid.spread(weight.shape)
    left, scale, zero_point = (
        _taken(tensor, order) for tensor in (weight, grid.scale, grid.zero_point)
    )
    made = _in_turn(
        left,
        _taken(_taken(hessian, order).mT, order),
        replace(grid, scale=scale, zero_point=zero_point),
    )
    return _taken(made, order.argsort(-1))


def _taken(tensor: Tensor, order: Tensor) -> Tensor:
    """The columns of each group in this order, as a copy."""
    return tensor.gather(-1, order.unsqueeze(-2).expand(tensor.shape))


def _in_turn(left: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
    """GPTQ from the first column to the last; ``left`` is changed."""
    factor = _inverse_factor(hessian)
    made, count = torch.empty_like(left), left.shape[-1]
    for start in range(0, count, _BLOCK):
        end = min(start + _BLOCK, count)
        errors = torch.zeros_like(left[..., start:end])
        for column in range(start, end):
            own = Grid(grid.scale[..., column], grid.zero_point[..., column], grid.low, grid.high)
            rounded = own.nearest(left[..., column])
            made[..., column] = rounded
            error = (left[..., column] - rounded) / factor[:, column, column].unsqueeze(-1)
            errors[..., column - start] = error
            rest = factor[:, column, column + 1 : end].unsqueeze(1)
            left[..., column + 1 : end] -= error.unsqueeze(-1) * rest
        left[..., end:] -= errors @ factor[:, start:end, end:]
    return made


def _inverse_factor(hessian: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse; inputs that are never there count as independent.

    With ``P`` that reverses an order, ``P H P = L L^T`` gives ``H^-1 = U^T U`` for ``U = P L^-1 P``, which is
    upper: one factorization and the inverse of a triangle.
    """
    damping = 0.01  # as a share of the mean of the diagonal
    mean = hessian.diagonal(dim1=-2, dim2=-1).double().mean(-1, keepdim=True).clamp(min=1e-12)
    while True:
        damped = hessian.double().clone()
        diagonal = damped.diagonal(dim1=-2, dim2=-1)
        diagonal += torch.where(diagonal > 0, damping * mean, mean)
        lower, failed = torch.linalg.cholesky_ex(damped.flip(-2, -1))
        if not bool(failed.any()):
            factor: Tensor = _inverse_of_lower(lower).flip(-2, -1)
            return factor.to(hessian.dtype)
        damping *= 10  # rounding made it singular


def _inverse_of_lower(lower: Tensor) -> Tensor:
    """The inverse of lower triangles ``(groups, columns, columns)``, by halves."""
    width = lower.shape[-1]
    if width <= _BLOCK:
        one = torch.eye(width, dtype=lower.dtype, device=lower.device)
        small: Tensor = torch.linalg.solve_triangular(lower, one.expand_as(lower), upper=False)
        return small
    half = width // 2
    first = _inverse_of_lower(lower[:, :half, :half])
    last = _inverse_of_lower(lower[:, half:, half:])
    found = torch.zeros_like(lower)
    found[:, :half, :half], found[:, half:, half:] = first, last
    found[:, half:, :half] = -(last @ (lower[:, half:, :half] @ first))
    return found


def adaround(weight: Tensor, hessian: Tensor, grid: Grid) -> Tensor:
    """Choose for each weight the integer below or above, by gradient descent on relaxed choices.

    Source: Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", 2020 (arXiv
    2004.10568), equations 21 to 24, on the quadratic form of equation 20; then single choices are turned as
    long as that helps (``descended``).

    >>> weight, grid = torch.tensor([[[0.4, 0.4]]]), Grid(torch.tensor(1.0), torch.tensor(0.0), -8, 7)
    >>> adaround(weight, torch.ones(1, 2, 2), grid).sum()  # the two meet the same input
    tensor(1.)
    """
    low, high, beginning = -0.1, 1.1, 0.2
    steps, rate, strength = 250, 0.05, 0.05
    floor = grid.floor(weight)
    rest = (weight / grid.scale + grid.zero_point - floor).clamp(0.01, 0.99)
    relaxed = torch.logit((rest - low) / (high - low)).requires_grad_()
    nearest = quadratic(grid.nearest(weight) - weight, hessian)
    norm = nearest.sum().clamp(min=1e-20)
    optimizer = torch.optim.Adam([relaxed], lr=rate)
    with torch.enable_grad():
        for step in range(steps):
            optimizer.zero_grad()
            up = (torch.sigmoid(relaxed) * (high - low) + low).clamp(0, 1)
            change = (floor + up - grid.zero_point) * grid.scale - weight
            loss = quadratic(change, hessian).sum() / norm
            progress = step / max(steps - 1, 1)
            if progress > beginning:
                bend = 20 - 18 * (progress - beginning) / (1 - beginning)
                loss = loss + strength * (1 - (2 * up - 1).abs().pow(bend)).mean() * 10
            loss.backward()
            optimizer.step()
    chosen = (torch.sigmoid(relaxed.detach()) > 0.5).to(floor.dtype)
    return descended(weight, hessian, grid, grid.values(floor + chosen))


def descended(
    weight: Tensor, hessian: Tensor, grid: Grid, made: Tensor, most: int | None = None
) -> Tensor:
    """``made`` with single weights moved by one step of the grid, per row the best one first, as long as
    that lowers the row's loss; at most ``most`` moves a row.

    >>> weight, grid = torch.tensor([[[0.4, 0.4]]]), Grid(torch.tensor(1.0), torch.tensor(0.0), -8, 7)
    >>> descended(weight, torch.ones(1, 2, 2), grid, torch.zeros(1, 1, 2)).sum()
    tensor(1.)
    """
    grid = grid.spread(weight.shape)
    steps = torch.round(made / grid.scale + grid.zero_point)
    change = grid.values(steps) - weight
    slope = 2 * change @ hessian
    bend = hessian.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    ones = torch.ones_like(slope)
    for _ in range(2 * weight.shape[-1] if most is None else most):
        move = torch.where(slope > 0, -ones, ones)
        inside = (steps + move >= grid.low) & (steps + move <= grid.high)
        delta = move * grid.scale
        gain = torch.where(inside, delta * slope + delta * delta * bend, ones)
        best, place = gain.min(-1, keepdim=True)
        helps = best < -1e-9 * bend.amax(-1, keepdim=True) * grid.scale.amax(-1, keepdim=True) ** 2
        if not bool(helps.any()):
            break
        chosen = torch.where(helps, delta.gather(-1, place), torch.zeros_like(best))
        steps.scatter_add_(-1, place, torch.where(helps, move.gather(-1, place), 0.0 * best))
        for group in range(hessian.shape[0]):
            slope[group] += 2 * chosen[group] * hessian[group][place[group, :, 0]]
    return grid.values(steps)


def better_rows(weight: Tensor, hessian: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """For each row the rounding with the smaller loss.

    >>> weight, zero = torch.tensor([[[1.0], [1.0]]]), torch.zeros(1, 2, 1)
    >>> better_rows(weight, torch.ones(1, 1, 1), zero, torch.tensor([[[3.0], [0.5]]])).flatten()
    tensor([0.0000, 0.5000])
    """
    is_better = quadratic(other - weight, hessian) < quadratic(one - weight, hessian)
    return torch.where(is_better.unsqueeze(-1), other, one)


def clipped(weight: Tensor, hessian: Tensor | None, grid: Grid) -> Tensor:
    """By how much to shrink the scale of each row so that rounding to the nearest loses least, values beyond
    the ends included: ``(groups, rows)``, at most 1. Without ``hessian`` the squared error counts.

    Source: the search of scales by the error of the layer's output in Nagel et al., "A White Paper on Neural
    Network Quantization", 2021 (arXiv 2106.08295), section 3.1.

    >>> weight = torch.tensor([[[0.1, 0.3, -0.2, 8.0]]])
    >>> grid = Grid(torch.tensor([[[8 / 7]]]), torch.tensor(0.0), -8, 7)
    >>> clipped(weight, torch.diag(torch.tensor([1.0, 1.0, 1.0, 0.0]))[None], grid) < 1
    tensor([[True]])
    """
    best = torch.ones(weight.shape[:2], device=weight.device)
    least = torch.full_like(best, torch.inf)
    for share in _SHRINK:
        narrow = replace(grid, scale=grid.scale * share)
        change = narrow.nearest(weight) - weight
        loss = change.square().sum(-1) if hessian is None else quadratic(change, hessian)
        is_better = loss < least * (1 - 1e-6)
        best = torch.where(is_better, torch.full_like(best, share), best)
        least = torch.where(is_better, loss, least)
        if bool((loss > _FAR * least).all()):  # what is cut off only grows
            break
    return best
