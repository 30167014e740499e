"""The fixed grid of HistogramObserver: bins of power-of-two width, straight from float32's bits.

The upper bits of a float32 (sign, exponent, first ``m`` bits of the mantissa) number a bin
``[k * 2**e, (k + 1) * 2**e)``, mirrored for negative values. The grid depends on nothing that was
measured. Of each bin the count is kept, and the sums of the position of its values within it and of
its square, as integers: they depend on the values in the bin alone, so bins add up exactly in any
order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from backquant.native import library
from backquant.native import library as measuring

Array = np.ndarray[Any, Any]

_MANTISSA = 23
_INFINITE = 255  # the exponent field of infinities and NaN
# Bits of a position within a bin: the sum of squares holds 2**39 values in one bin.
_POSITION = 12
# As many values may be summed in float64: their squared positions stay below 2**53.
_EXACT = 1 << (53 - 2 * _POSITION)


class Counted(NamedTuple):
    """Values (float32 ``[k]``; NaN stands for none) of which each counts ``times`` times."""

    values: Tensor
    times: int


class Spread(NamedTuple):
    """What bins say about values: in ascending order, a number of them (float64 ``[k]``) spread
    evenly from lower to upper (float64 ``[k]``), which may be equal."""

    lower: Array
    upper: Array
    number: Array

    def counts(self, parts: int, low: float, high: float) -> Array:
        """How many values lie in each of ``parts`` equal parts from ``low`` to ``high``, as float64.

        >>> two = Spread(np.array([0.0, 2.0]), np.array([0.0, 4.0]), np.array([1.0, 2.0]))
        >>> two.counts(4, 0.0, 4.0).tolist()
        [1.0, 0.0, 1.0, 1.0]
        """
        edges = np.linspace(low, high, parts + 1)
        points = self.lower == self.upper
        place = np.searchsorted(edges, self.lower[points], "right") - 1
        held = np.bincount(place.clip(0, parts - 1), self.number[points], parts)
        lower, upper, number = self.lower[~points], self.upper[~points], self.number[~points]
        # they do not overlap, and ascend: what lies below an edge is linear in each
        ends = np.stack([lower, upper], 1).ravel()
        below = np.repeat(np.cumsum(number), 2) - np.stack([number, 0 * number], 1).ravel()
        if len(ends):
            held += np.diff(np.interp(edges, ends, below))
        return held


class Bins(NamedTuple):
    """Bins that are not empty: four tensors of one length.

    ``key`` (int32, ascending with the values): the upper bits of the magnitude as a number n, or
    -n - 1 for negative values; ``number`` (int64): how many values; ``first``, ``second`` (int64):
    the sums of position and its square, in units of 2**-12 of the bin (of the last bit of float32
    in bins that are finer), from its end near zero.
    """

    key: Tensor
    number: Tensor
    first: Tensor
    second: Tensor

    def spread(self, mantissa_bits: int, low: float, high: float) -> Spread:
        """Where the values lie; ``low`` and ``high`` are the extremes of all.

        Mean and variance are those of the values in each bin; a bin of equal values has no width.

        >>> bins = add_to_bins(None, [Counted(torch.tensor([-1.0, 2.0, 2.0]), 1)], mantissa_bits=2)
        >>> bins.spread(2, -1.0, 2.0).lower.tolist()
        [-1.0, 2.0]
        """
        key, counted, first, second = (part.cpu().numpy() for part in self)
        width = _MANTISSA - mantissa_bits
        steps = 1 << min(width, _POSITION)
        number = counted.astype(np.float64)
        mean = first / number
        equal = second * counted == first * first
        reach = np.sqrt(np.maximum(second / number - mean * mean, 0) * 3) + 0.5
        reach[equal] = 0.0
        mean += 0.5 * ~equal
        sign = key >> 31
        magnitude = key ^ sign
        near = (magnitude << width).view(np.float32).astype(np.float64)
        exponent = np.maximum(magnitude >> mantissa_bits, 1) - (127 + mantissa_bits)
        unit = np.ldexp(1.0 / steps, exponent)
        inner = near + np.maximum(mean - reach, 0) * unit
        outer = near + np.minimum(mean + reach, steps) * unit
        negative = sign < 0
        lower = np.where(negative, -outer, inner).clip(low, high)
        upper = np.where(negative, -inner, outer).clip(low, high)
        lower[0], upper[-1] = low, high
        return Spread(lower, upper, number)


def bin_places(values: Array, mantissa_bits: int) -> tuple[Array, Array, Array]:
    """The key of the bin (int64) of each of the float32 ``values`` (``[k]``), the position in it
    (int64), and whether the value is finite.

    >>> key, position, finite = bin_places(np.array([1.01, np.nan], np.float32), mantissa_bits=2)
    >>> key[0] >> 2, position[0], finite.tolist()
    (np.int64(127), np.int64(163), [True, False])
    """
    bits, width = (values + np.float32(0)).view(np.int32), _MANTISSA - mantissa_bits
    sign = bits >> 31
    magnitude = (bits >> width) & (((_INFINITE + 1) << mantissa_bits) - 1)
    steps = min(width, _POSITION)
    position = (bits >> (width - steps)) & ((1 << steps) - 1)
    finite = magnitude < (_INFINITE << mantissa_bits)
    return (magnitude ^ sign).astype(np.int64), position.astype(np.int64), finite


def add_to_bins(
    bins: Bins | None,
    counted: Sequence[Counted],
    mantissa_bits: int,
    within: tuple[float, float] = (-math.inf, math.inf),
) -> Bins:
    """``bins`` and the finite values of ``counted`` (at least one) in one histogram.

    ``within``: all finite values of ``counted`` lie between the two; knowing it saves time.

    >>> counted = [Counted(torch.tensor([1.0]), 3), Counted(torch.tensor([-1.0, 1.01]), 1)]
    >>> bins = add_to_bins(None, counted, mantissa_bits=2)
    >>> bins.number, bins.first
    (tensor([1, 4]), tensor([  0, 163]))
    """
    keys = tuple(_key_of(end, mantissa_bits) for end in within)
    least, most = keys if bins is None else _wider(keys, bins)
    on_cpu = counted[0].values.device.type == "cpu"
    way = _counted_by_library if on_cpu and library.is_here() else _counted
    total = way(counted, mantissa_bits, least, most)
    if bins is not None:
        total.add(bins)
    return total.bins()


def _counted(counted: Sequence[Counted], mantissa_bits: int, least: int, most: int) -> _Table:
    """The table of all values, as integers."""
    values: dict[int, list[Tensor]] = {}
    for part in counted:
        values.setdefault(part.times, []).append(part.values)
    joined = {times: torch.cat(parts) for times, parts in values.items()}
    table = _Table.of(least, most, counted[0].values.device, torch.float64)
    several = [times for times in joined if times != 1]
    if several and several[0] * len(joined[several[0]]) < _EXACT:
        table.take(joined[several[0]], mantissa_bits)
        table.sums.mul_(several.pop(0))
    if 1 in joined:
        table.take(joined[1], mantissa_bits)
    total = _Table(least, table.sums.to(torch.int64))
    for times in several:
        table.sums.zero_()
        table.take(joined[times], mantissa_bits)
        total.sums.add_(table.sums.to(torch.int64), alpha=times)
    return total


def _counted_by_library(
    counted: Sequence[Counted], mantissa_bits: int, least: int, most: int
) -> _Table:
    """``_counted`` on the CPU, the three sums of a bin side by side."""
    sums = torch.zeros(most - least + 3, 3, dtype=torch.int64, device="cpu")
    bits = mantissa_bits, min(_MANTISSA - mantissa_bits, _POSITION)
    for values, times in counted:
        measuring.count(values, times, bits, least, sums)
    return _Table(least, sums.t())


def merge_bins(one: Bins, two: Bins) -> Bins:
    """The bins of the values of both.

    >>> one, two = (add_to_bins(None, [Counted(torch.tensor([x]), 1)], 2) for x in (1.0, 1.01))
    >>> merge_bins(one, two).number
    tensor([2])
    """
    least, most = _wider(_wider((0, 0), one), two)
    table = _Table.of(least, most, one.key.device, torch.int64)
    table.add(one)
    table.add(two)
    return table.bins()


class _Table(NamedTuple):
    """``sums`` (``[3, n]``): number, first and second of the bins from the key ``least`` on; in front
    of and behind them a column that takes what is not finite.
    """

    least: int
    sums: Tensor

    @staticmethod
    def of(least: int, most: int, device: torch.device, dtype: torch.dtype) -> _Table:
        return _Table(least, torch.zeros(3, most - least + 3, dtype=dtype, device=device))

    def take(self, values: Tensor, mantissa_bits: int) -> None:
        """Add ``values``, each once. ``sums`` are float64, which holds them exactly."""
        bits, width = values.add_(0.0).view(torch.int32), _MANTISSA - mantissa_bits
        steps = min(width, _POSITION)
        sign = (bits >> 31).bitwise_and_((1 << (31 - width)) - 1)
        column = (bits >> width).bitwise_xor_(sign).sub_(self.least - 1)
        place = column.clamp_(0, self.sums.size(1) - 1).to(torch.int64)
        position = (bits >> (width - steps)).bitwise_and_((1 << steps) - 1).to(torch.float64)
        number, first, second = self.sums
        number.scatter_add_(0, place, torch.ones_like(position))
        first.scatter_add_(0, place, position)
        second.scatter_add_(0, place, position.square_())

    def add(self, bins: Bins) -> None:
        """Add ``bins``; ``sums`` are integers."""
        place = bins.key.sub(self.least - 1).to(torch.int64)
        for total, addend in zip(self.sums, bins[1:], strict=True):
            total.scatter_add_(0, place, addend)

    def bins(self) -> Bins:
        """What is not empty."""
        place = self.sums[0, 1:-1].nonzero().squeeze(1)
        key = (place + self.least).to(torch.int32)
        place.add_(1)
        return Bins(key, *(row.index_select(0, place) for row in self.sums))


def _key_of(value: float, mantissa_bits: int) -> int:
    """The key of the bin that holds a value, of the outermost finite bin for infinity."""
    bits: int = torch.tensor(abs(value), dtype=torch.float32).view(torch.int32).item()  # type: ignore[assignment]
    magnitude = min(bits >> (_MANTISSA - mantissa_bits), (_INFINITE << mantissa_bits) - 1)
    return -magnitude - 1 if value < 0 else magnitude


def _wider(keys: tuple[int, ...], bins: Bins) -> tuple[int, int]:
    """The least and the largest of two keys and those of ``bins``."""
    if not len(bins.key):
        return keys[0], keys[1]
    ends = bins.key[:: max(1, len(bins.key) - 1)].tolist()
    return min(keys[0], ends[0]), max(keys[1], ends[-1])
