"""Rounding weights so that the output of their layer changes least: GPTQ, AdaRound, clipped scales.

All judge by ``quadratic``, with the mean of ``x x^T`` of the layer's inputs, row by row.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from backquant.accuracy.grid import Grid, quadratic

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
