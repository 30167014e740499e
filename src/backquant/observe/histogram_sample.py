"""What HistogramObserver takes from a tensor: its exact extremes and the values to be counted.

1. Up to ``EVERY_VALUE`` values are all counted, once each.
2. Of more, the tails are counted exactly and the bulk by every n-th value:

   a. the tensor is read as a table, whose columns are put into 512 groups. Of the maxima of the
      groups the 16th (one more for each 8,192 values, within ``TAIL``) in order is the limit: what lies
      above counts once each. So it is with the minima below zero. 8 bits clip a normal distribution
      where one of 10,000 values lies outside.
   b. of the rest, every n-th value (in memory order) counts n times. n shares no factor with the
      size, so that every channel and position has its turn.

   A large value among them is replaced by NaN, which no bin holds.

What is taken depends on the values, the shape and the memory order of the tensor alone.

On the CPU by the library of kernels, or by numpy's functions where it is not installed: a network has a
hundred tensors of some ten thousand values, of which calling torch's takes longer than reading them.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from backquant.native import library, measuring
from backquant.observe.histogram_grid import Array, Counted
from backquant.observe.ranges import finite_range

EVERY_VALUE = 1 << 12
TAIL = (16, 128)
_COLUMNS = (1 << 9, 1 << 11)
_GROUPS = 1 << 9
_BULK = (1 << 11, 1 << 13)
_NAN = np.float32(math.nan)


class Sampled(NamedTuple):
    """``low`` and ``high``: the extremes; (inf, -inf) when no value is finite.

    ``ignored``: how many values are not finite.
    """

    low: float
    high: float
    ignored: int
    counted: tuple[Counted, ...]


class _Cut(NamedTuple):
    """How a tensor of some size is cut: a table of ``columns``, ``inside`` of the values in all; of
    the groups of columns ``tail`` for the tail; every ``step``-th value for the bulk.
    """

    columns: int
    inside: int
    tail: int
    step: int


def sample_values(x: Tensor) -> Sampled:
    """The values of ``x`` (any shape, any real dtype) to be counted; copies, no views.

    >>> sample_values(torch.tensor([[1.0, -2.0]])).counted
    (Counted(values=tensor([ 1., -2.]), times=1),)
    >>> taken = sample_values(torch.arange(100_000.0))
    >>> [(len(part.values), part.times) for part in taken.counted]
    [(241, 1), (3031, 33)]
    """
    flat = _in_memory_order(x)
    if flat.dtype != torch.float32:
        flat = flat.to(torch.float32)
    number = flat.numel()
    if number > EVERY_VALUE:
        taken = _of_many_on_cpu(flat) if _is_plain(flat) else _of_many_elsewhere(flat)
    else:
        taken = _of_few(flat.numpy()) if number and _is_plain(flat) else None
    return _of_finite_values(flat) if taken is None else taken


def _is_plain(flat: Tensor) -> bool:
    """Whether numpy can read the memory."""
    return flat.device.type == "cpu" and not flat.is_neg()


def _in_memory_order(x: Tensor) -> Tensor:
    """``x`` as a vector, without a copy when its memory has no gaps."""
    if not x.is_contiguous():
        x = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))
    return x.reshape(-1)


def _of_finite_values(flat: Tensor) -> Sampled:
    """Rule 1, for what is finite; what is left may be many, then rule 2."""
    lowest, highest, ignored = finite_range(flat)
    low, high = lowest.item(), highest.item()
    if not ignored:
        counted = (Counted(flat.clone(), 1),) if flat.numel() else ()
        return Sampled(low, high, 0, counted)
    kept = flat[torch.isfinite(flat)]
    if kept.numel() > EVERY_VALUE:
        return sample_values(kept)._replace(ignored=ignored)
    return Sampled(low, high, ignored, (Counted(kept, 1),) if kept.numel() else ())


def _of_few(flat: Array) -> Sampled | None:
    """Rule 1; None when a value is not finite."""
    low, high = float(np.minimum.reduce(flat)), float(np.maximum.reduce(flat))
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    return Sampled(low, high, 0, (Counted(torch.from_numpy(flat.copy()), 1),))


def _of_many_on_cpu(flat: Tensor) -> Sampled | None:
    """Rule 2; None when a value is not finite."""
    if not library.is_here():
        return _of_many(flat.numpy())
    size = flat.numel()
    columns, inside, tail, step = _cut(size)
    found = measuring.sampled(flat, (columns, inside, _GROUPS, tail, step), -(-size // step))
    if found is None:
        return None
    low, high, large, bulk = found
    return Sampled(low, high, 0, (Counted(large, 1), Counted(bulk, step)))


def _of_many(flat: Array) -> Sampled | None:
    """Rule 2; None when a value is not finite."""
    columns, inside, tail, step = _cut(flat.size)
    table = flat[:inside].reshape(-1, columns)
    tops, bottoms = np.maximum.reduce(table, 0), np.minimum.reduce(table, 0)
    low, high = float(np.minimum.reduce(bottoms)), float(np.maximum.reduce(tops))
    rest = flat[inside:]
    if rest.size:
        low = _least(low, float(np.minimum.reduce(rest)))
        high = -_least(-high, -float(np.maximum.reduce(rest)))
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    below = -math.inf if low >= 0 else -_limit(-bottoms, tail)
    limits = below, math.inf if high <= 0 else _limit(tops, tail)
    places = _outside(bottoms, tops, limits).nonzero()[0]
    large = table.take(places, 1).reshape(-1)
    if rest.size:
        large = np.concatenate((large, rest))
    large = large[_outside(large, large, limits)]
    bulk = flat[::step].copy()
    bulk[_outside(bulk, bulk, limits)] = _NAN
    counted = Counted(torch.from_numpy(large), 1), Counted(torch.from_numpy(bulk), step)
    return Sampled(low, high, 0, counted)


def _limit(tops: Array, tail: int) -> Any:
    """The ``tail``-th largest maximum of the groups of some columns."""
    groups = tops.size // _GROUPS
    tops = np.maximum.reduce(tops[: groups * _GROUPS].reshape(groups, _GROUPS), 0)
    tops.partition(_GROUPS - tail)
    return tops[_GROUPS - tail]


def _outside(low: Array, high: Array, limits: tuple[float, float]) -> Array:
    """Where ``low`` is below, or ``high`` above."""
    found: Array = high > limits[1]
    if limits[0] > -math.inf:
        found |= low < limits[0]
    return found


def _of_many_elsewhere(flat: Tensor) -> Sampled | None:
    """``_of_many`` for memory that numpy cannot read: the same values."""
    columns, inside, tail, step = _cut(flat.numel())
    table, rest = flat[:inside].view(-1, columns), flat[inside:]
    tops, bottoms = table.amax(0), table.amin(0)
    ends = torch.cat((rest, bottoms)).amin(), torch.cat((rest, tops)).amax()
    low, high = torch.stack(ends).tolist()
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    grouped = (each[: columns // _GROUPS * _GROUPS].view(-1, _GROUPS) for each in (-bottoms, tops))
    below, above = (each.amax(0).topk(tail).values[-1] for each in grouped)
    below = torch.full_like(below, -math.inf) if low >= 0 else -below
    above = torch.full_like(above, math.inf) if high <= 0 else above
    places = ((tops > above) | (bottoms < below)).nonzero().squeeze(1)
    large = torch.cat((table.index_select(1, places).view(-1), rest))
    large = large[(large > above) | (large < below)]
    bulk = flat[::step].clone()
    bulk.masked_fill_((bulk > above) | (bulk < below), math.nan)
    return Sampled(low, high, 0, (Counted(large, 1), Counted(bulk, step)))


def _least(one: float, two: float) -> float:
    """The smaller one; NaN if one of them is."""
    return one if math.isnan(one) or one < two else two


@lru_cache(maxsize=1024)
def _cut(number: int) -> _Cut:
    """Columns that divide ``number`` where there is such a number of about the wanted size."""
    columns = _between(_COLUMNS, 1 << (number >> 7).bit_length())
    wider = range(columns, 2 * columns + 1)
    columns = next((each for each in wider if number % each == 0), columns)
    step = -(-number // _between(_BULK, number >> 5))
    while math.gcd(step, number) != 1:
        step += 1
    return _Cut(columns, number // columns * columns, _between(TAIL, number >> 13), step)


def _between(limits: tuple[int, int], value: int) -> int:
    return min(max(limits), max(min(limits), value))
