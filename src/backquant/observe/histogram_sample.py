"""What HistogramObserver takes from a tensor: its exact extremes and the values to be counted.

1. Up to ``EVERY_VALUE`` values are all counted, once each.
2. Of more, the tails are counted exactly and the bulk by every n-th value:

   a. the tensor is cut into rows; those with the largest values (one for 8,192 values, within
      ``TAIL_ROWS``) hold every value above the least of their maxima. Those values count once each.
      Negative values rank by their distance from zero relative to the lowest, positive ones relative
      to the highest. 8 bits clip a normal distribution where one of 10,000 values lies outside.
   b. of the rest, every n-th value (in memory order) counts n times. n shares no factor with the
      size, so that every channel and position has its turn.

   A large value among them is replaced by NaN, which no bin holds.

What is taken depends on the values, the shape and the memory order of the tensor alone.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from backquant.observe.histogram_grid import Counted
from backquant.observe.ranges import finite_range

__all__ = ["Sampled", "sample_values"]

EVERY_VALUE = 1 << 12
TAIL_ROWS = (16, 128)
_ROW_LENGTHS = (64, 256)
_ROWS = 1 << 11
_STEEPEST = 2.0**20
_BULK = (1 << 11, 1 << 13)


class Sampled(NamedTuple):
    """``low`` and ``high``: the extremes; (inf, -inf) when no value is finite.

    ``ignored``: how many values are not finite.
    """

    low: float
    high: float
    ignored: int
    counted: tuple[Counted, ...]


class _Cut(NamedTuple):
    """How a tensor of some size is cut: ``rows`` of ``length``, ``tail`` of them for the tail, and
    every ``step``-th value for the bulk.
    """

    length: int
    rows: int
    tail: int
    step: int


def sample_values(x: Tensor) -> Sampled:
    """The values of ``x`` (any shape, any real dtype) to be counted; copies, no views.

    >>> sample_values(torch.tensor([[1.0, -2.0]])).counted
    (Counted(values=tensor([ 1., -2.]), times=1),)
    >>> taken = sample_values(torch.arange(100_000.0))
    >>> [(len(part.values), part.times) for part in taken.counted]
    [(992, 1), (3031, 33)]
    """
    flat = _in_memory_order(x)
    if flat.dtype != torch.float32:
        flat = flat.to(torch.float32)
    if flat.numel() > EVERY_VALUE:
        taken = _of_many(flat)
        if taken is not None:
            return taken
    return _of_every_value(flat)


def _in_memory_order(x: Tensor) -> Tensor:
    """``x`` as a vector, without a copy when its memory has no gaps."""
    if not x.is_contiguous():
        x = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))
    return x.reshape(-1)


def _of_every_value(flat: Tensor) -> Sampled:
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


def _of_many(flat: Tensor) -> Sampled | None:
    """Rule 2; None when a value is not finite."""
    cut = _cut(flat.numel())
    inside = cut.rows * cut.length
    rows = flat[:inside].view(cut.rows, cut.length)
    tops, bottoms = rows.amax(1), rows.amin(1)
    low, high = bottoms.amin().item(), tops.amax().item()
    rest = flat[inside:] if inside < flat.numel() else None
    if rest is not None:
        ends = rest.aminmax()
        low, high = _least(low, ends.min.item()), -_least(-high, -ends.max.item())
    if not (math.isfinite(low) and math.isfinite(high)):
        return None
    slope = _slope(low, high)
    reach = tops if low >= 0 else torch.maximum(tops, bottoms.mul_(slope))
    largest, places = reach.topk(cut.tail)
    limit = largest[-1]
    tail = rows.index_select(0, places).view(-1)
    if rest is not None:
        tail = torch.cat((tail, rest))
    bulk = flat[:: cut.step].clone()
    ranks = (tail, bulk) if low >= 0 else (F.leaky_relu(tail, slope), F.leaky_relu(bulk, slope))
    tail = tail[ranks[0] > limit]
    bulk.masked_fill_(ranks[1] > limit, math.nan)
    return Sampled(low, high, 0, (Counted(tail, 1), Counted(bulk, cut.step)))


def _slope(low: float, high: float) -> float:
    """What negative values are multiplied with, so that the lowest ranks as high as the highest."""
    if low >= 0 or high <= 0:
        return -1.0
    return max(-_STEEPEST, min(-1 / _STEEPEST, high / low))


def _least(one: float, two: float) -> float:
    """The smaller one; NaN if one of them is."""
    return one if math.isnan(one) or one < two else two


@lru_cache(maxsize=1024)
def _cut(number: int) -> _Cut:
    """Rows of a multiple of 64, which divides ``number`` where one of about the wanted length does."""
    length = _between(_ROW_LENGTHS, 1 << (number // _ROWS).bit_length())
    longer = range(length, 2 * length + 1, 64)
    length = next((each for each in longer if number % each == 0), length)
    step = -(-number // _between(_BULK, number >> 5))
    while math.gcd(step, number) != 1:
        step += 1
    return _Cut(length, number // length, _between(TAIL_ROWS, number >> 13), step)


def _between(limits: tuple[int, int], value: int) -> int:
    return min(max(limits), max(min(limits), value))
