"""What HistogramObserver takes from a tensor: its exact extremes and the values to be counted.

1. Up to ``EVERY_VALUE`` values are all counted, once each.
2. Of more, the tails are counted exactly and the bulk by every n-th value:

   a. the tensor is cut into rows; the ``TAIL_ROWS`` rows with the largest values hold every value
      above the least of their maxima. Those values count once each; likewise at the low end.
   b. between the two, every n-th value (in memory order) counts n times. n shares no factor with
      the sizes, so that every channel and position has its turn.

What is taken depends on the values, the shape and the memory order of the tensor alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from backquant.observe.histogram_grid import Counted
from backquant.observe.ranges import finite_range

__all__ = ["Sampled", "sample_values"]

EVERY_VALUE = 1 << 12
TAIL_ROWS = 32
_ROW_LENGTHS = (64, 256)
_ROWS = 1 << 11
_BULK = (1 << 12, 1 << 14)


class Sampled(NamedTuple):
    """``low`` and ``high``: the extremes (``[]``); (inf, -inf) when no value is finite.

    ``ignored``: how many values are not finite.
    """

    low: Tensor
    high: Tensor
    ignored: int
    counted: tuple[Counted, ...]


def sample_values(x: Tensor) -> Sampled:
    """The values of ``x`` (any shape, any real dtype) to be counted; copies, no views.

    >>> sample_values(torch.tensor([[1.0, -2.0]])).counted
    (Counted(values=tensor([ 1., -2.]), times=1),)
    >>> taken = sample_values(torch.arange(100_000.0))
    >>> [(len(part.values), part.times) for part in taken.counted]
    [(1984, 1), (32, 1), (3704, 27)]
    """
    flat = _in_memory_order(x).to(torch.float32)
    if flat.numel() > EVERY_VALUE:
        taken = _of_many(flat)
        if taken is not None:
            return taken
    low, high, ignored = finite_range(flat)
    kept = flat[torch.isfinite(flat)] if ignored else flat
    if kept.numel() > EVERY_VALUE and ignored:
        return sample_values(kept)._replace(ignored=ignored)
    values = kept.clone() if kept is flat else kept
    return Sampled(low, high, ignored, (Counted(values, 1),) if values.numel() else ())


def _in_memory_order(x: Tensor) -> Tensor:
    """``x`` as a vector, without a copy when its memory has no gaps."""
    if not x.is_contiguous():
        x = x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))
    return x.reshape(-1)


def _of_many(flat: Tensor) -> Sampled | None:
    """Rule 2; None when a value is not finite. An end without values beyond zero has no tail."""
    length = _between(_ROW_LENGTHS, 1 << (flat.numel() // _ROWS).bit_length())
    count = flat.numel() // length
    rows, rest = flat[: count * length].view(count, length), flat[count * length :]
    tops, bottoms = rows.amax(1), rows.amin(1)
    low, high = bottoms.amin(), tops.amax()
    if rest.numel():
        low, high = torch.minimum(low, rest.amin()), torch.maximum(high, rest.amax())
    least, most = low.item(), high.item()
    if not (math.isfinite(least) and math.isfinite(most)):
        return None
    step = _step(flat.numel())
    bulk = flat[::step].clone()
    tails = []
    if most > 0:
        top, places = tops.topk(TAIL_ROWS)
        limit = top[-1]
        tails = [part[part > limit] for part in (rows.index_select(0, places).view(-1), rest)]
        bulk.masked_fill_(bulk > limit, math.nan)
    if least < 0:
        bottom, places = bottoms.topk(TAIL_ROWS, largest=False)
        limit = bottom[-1]
        tails += [part[part < limit] for part in (rows.index_select(0, places).view(-1), rest)]
        bulk.masked_fill_(bulk < limit, math.nan)
    return Sampled(low, high, 0, (*(Counted(tail, 1) for tail in tails), Counted(bulk, step)))


def _step(number: int) -> int:
    step = -(-number // _between(_BULK, number >> 5))
    while math.gcd(step, number) != 1:
        step += 1
    return step


def _between(limits: tuple[int, int], value: int) -> int:
    return min(max(limits), max(min(limits), value))
