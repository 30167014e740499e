"""Rows of weights whose scale is set by what reads next to nothing.

A row (output channel) has one scale, which follows its largest weight. Where that reads a channel that is
hardly ever there, the row is rounded far more coarsely than the channels need that carry something.

1. A row that is cut at a share of its range loses two powers at its output: a twelfth of the square of a step
   times the mean square of each channel that it reads; and no more than the square of the sum of what is cut
   off of each weight, times the root of that mean square (as if all these channels moved together).
2. A channel counts as a hundredth of the layer's mean size at least: what calibration has not shown may come.
3. Rows that keep ``WORTH`` of their loss at half their range are cut, at the share with which they lose
   least. That takes a few operations for each weight, and more for these rows alone.

So a row loses less on what calibration has shown, whatever the model makes of it, and no run is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from backquant.accuracy.biases.layers import layer_calls
from backquant.accuracy.grid import Grid, columns
from backquant.accuracy.recipes.draft import weighted_part
from backquant.accuracy.recipes.layers import Layer

#: What at most is left of the loss of a row that is cut at half its range.
WORTH = 0.6
_HALF = 0.5
_FLOOR = 1e-4  # of the mean square
_SHARES = tuple(1 - 0.04 * step for step in range(1, 16))  # of a scale, down to 0.4


@dataclass(frozen=True)
class CutRows:
    """Weight qparams with smaller scales by the path of the layer, and how many rows these are for."""

    qparams: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    rows: int = 0

    @property
    def changes(self) -> bool:
        """Whether there are any."""
        return bool(self.qparams)

    def __str__(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"{rows} of weights cut, of which the largest read next to nothing: {', '.join(self.qparams)}"


def cut_rows(
    prepared: fx.GraphModule, reference: fx.GraphModule, squares: Mapping[str, Tensor]
) -> CutRows:
    """Cut rows of ``reference``, in place. ``squares``: summed over all values of each channel that a layer
    reads, by its path."""
    qparams, count = {}, 0
    with torch.no_grad():
        for call in layer_calls(prepared, reference, []).values():
            layer = Layer(call.path, (call.node,), call.float_part, weighted_part(call.called))
            share = shares(layer, squares[call.path]) if call.path in squares else None
            if share is not None:
                own = layer.qparams()
                qparams[layer.path] = {**own, "scale": own["scale"] * share}
                layer.reference._store_weight(layer.weight, qparams[layer.path])
                count += int((share < 1).sum())
    return CutRows(qparams, count)


def shares(layer: Layer, squares: Tensor) -> Tensor | None:
    """By how much the scale of each row shrinks, at most 1; ``None`` where none is cut, or where rows have no
    scales of their own."""
    scale: Tensor = layer.reference.weight_scale
    is_by_row = scale.dim() == 1 and scale.numel() == layer.weight.shape[0]
    if not is_by_row or layer.reference.weight_axis != 0 or not bool(squares.sum() > 0):
        return None
    weight, power = columns(layer.weight, layer.groups), _powers(layer, squares)
    grid = layer.grid()
    worth = left_at_half(weight, power, grid) < WORTH
    if not bool(worth.any()):
        return None
    share = torch.ones(weight.shape[:2], device=weight.device)
    for group, rows in enumerate(worth):
        own = replace(grid, scale=grid.scale[group, rows], zero_point=grid.zero_point[group, rows])
        share[group, rows] = _best(weight[group, rows], power[group], own)
    return share.flatten()


def _powers(layer: Layer, squares: Tensor) -> Tensor:
    """The power of what each column reads, of 1 in the mean: ``(groups, columns)``. Rule 2."""
    power = (squares / squares.mean()).nan_to_num(0.0, 0.0, 0.0)
    power = power.clamp(min=_FLOOR).to(layer.weight.dtype)
    taps = layer.weight[0, 0].numel()
    return power.reshape(layer.groups, -1).repeat_interleave(taps, -1)


def left_at_half(weight: Tensor, power: Tensor, grid: Grid) -> Tensor:
    """What is left of the loss of each row at half its range: ``(groups, rows)``.

    Args:
        weight: ``(groups, rows, columns)``.
        power: ``(groups, columns)``.

    >>> weight, zero = torch.tensor([[[0.1, 0.3, 8.0]]]), torch.zeros(1, 1, 3)
    >>> grid = Grid(torch.full((1, 1, 3), 0.1), zero, -80, 80)
    >>> left_at_half(weight, torch.tensor([[1.0, 1.0, 0.0]]), grid)
    tensor([[0.2500]])
    >>> left_at_half(weight, torch.tensor([[0.0, 0.0, 1.0]]), grid) > 1
    tensor([[True]])
    """
    size = weight.abs()
    over = size.sub_(_HALF * size.amax(-1, keepdim=True)).clamp_(min=0)
    cut_off = (over @ power.sqrt().unsqueeze(-1)).squeeze(-1).square()
    rounded = grid.scale[..., 0].square() / 12 * power.sum(-1, keepdim=True)
    return torch.where(over.any(-1), _HALF**2 + cut_off / rounded.clamp(min=1e-30), 1.0)


def _best(weight: Tensor, power: Tensor, grid: Grid) -> Tensor:
    """The share with which each row of ``(rows, columns)`` loses least."""
    found = [(1.0, _loss(weight, power, grid))]
    for share in _SHARES:
        found.append((share, _loss(weight, power, replace(grid, scale=grid.scale * share))))
    best = torch.stack([loss for _, loss in found]).argmin(0)
    return torch.tensor([share for share, _ in found], device=weight.device)[best]


def _loss(weight: Tensor, power: Tensor, grid: Grid) -> Tensor:
    """Rule 1, with the errors that rounding makes."""
    error = (grid.nearest(weight) - weight).abs()
    is_cut = error > 0.51 * grid.scale
    rounded = error.masked_fill(is_cut, 0.0).square() @ power
    cut_off = error.masked_fill(~is_cut, 0.0) @ power.sqrt()
    return rounded + cut_off.square()
