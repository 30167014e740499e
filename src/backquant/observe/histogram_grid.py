"""The fixed grid of HistogramObserver: bins of power-of-two width, straight from float32's bits.

The upper bits of a float32 (sign, exponent, first ``m`` bits of the mantissa) number a bin
``[k * 2**e, (k + 1) * 2**e)``, mirrored for negative values. The grid depends on nothing that was
measured. Of each bin the count is kept, and the sums of the position of its values within it and of
its square, as integers: they depend on the values in the bin alone, so bins add up exactly in any
order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = ["Array", "Bins", "bin_places", "Counted", "Spread", "add_to_bins", "merge_bins"]

Array = np.ndarray[Any, Any]

_MANTISSA = 23
_INFINITE = 255  # the exponent field of infinities and NaN
# Bits of a position within a bin: the sum of squares holds 2**39 values in one bin.
_POSITION = 12


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
    """Of float32 ``values`` (``[k]``): the key of the bin (int64), the position in it (int64), and
    whether the value is finite.

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


def add_to_bins(bins: Bins | None, counted: Sequence[Counted], mantissa_bits: int) -> Bins:
    """``bins`` and the finite values of ``counted`` (at least one) in one histogram.

    >>> counted = [Counted(torch.tensor([1.0]), 3), Counted(torch.tensor([-1.0, 1.01]), 1)]
    >>> bins = add_to_bins(None, counted, mantissa_bits=2)
    >>> bins.number, bins.first
    (tensor([1, 4]), tensor([  0, 163]))
    """
    values = torch.cat([part.values for part in counted]) + 0.0  # minus zero becomes zero
    lengths = torch.tensor([len(part.values) for part in counted])
    number = torch.tensor([part.times for part in counted]).repeat_interleave(lengths)
    number = number.to(values.device)
    bits, width = values.view(torch.int32), _MANTISSA - mantissa_bits
    key = (bits >> width).bitwise_and_(((_INFINITE + 1) << mantissa_bits) - 1)
    key.bitwise_xor_(bits >> 31)
    steps = min(width, _POSITION)
    position = (bits >> (width - steps)).bitwise_and_((1 << steps) - 1).to(torch.int64)
    first = number * position
    added = Bins(key, number, first, position.mul_(first))
    return _sum([added] if bins is None else [added, bins], mantissa_bits)


def merge_bins(one: Bins, two: Bins, mantissa_bits: int) -> Bins:
    """The bins of the values of both.

    >>> one, two = (add_to_bins(None, [Counted(torch.tensor([x]), 1)], 2) for x in (1.0, 1.01))
    >>> merge_bins(one, two, 2).number
    tensor([2])
    """
    return _sum([one, two], mantissa_bits)


def _sum(parts: Sequence[Bins], mantissa_bits: int) -> Bins:
    """One entry for each key among ``parts``, whose keys may repeat; what is not finite is left out.

    Laid out are zero and, of either sign, the bins from the smallest to the largest magnitude: in
    front of, and behind them, a place for what is not finite.
    """
    infinite = _INFINITE << mantissa_bits
    magnitudes = [part.key ^ (part.key >> 31) for part in parts]
    least, most = infinite, 0
    for magnitude in magnitudes:
        if len(magnitude):
            least, most = _finite_ends(magnitude, infinite, least, most)
    skipped = max(0, min(least, most) - 1)
    side = most - skipped + 2
    sums = parts[0].number.new_zeros(3, 2 * side)
    for part, magnitude in zip(parts, magnitudes, strict=True):
        place = (magnitude - skipped).clamp_(0, side - 1).bitwise_xor_(part.key >> 31)
        place = place.add_(side).to(torch.int64)
        for total, addend in zip(sums, part[1:], strict=True):
            total.scatter_add_(0, place, addend)
    sums[0, 0] = sums[0, -1] = 0
    place = sums[0].nonzero().squeeze(1)
    key = (place - side).to(torch.int32)
    sign = key >> 31
    magnitude = key ^ sign
    key = torch.where(magnitude > 0, magnitude + skipped, magnitude) ^ sign
    return Bins(key, *sums.index_select(1, place))


def _finite_ends(magnitude: Tensor, infinite: int, least: int, most: int) -> tuple[int, int]:
    """The smallest above zero and the largest of finite magnitudes, ``least`` and ``most`` included.

    By rotation, so that what is to be left out stands at the other end.
    """
    mask = (1 << infinite.bit_length()) - 1
    beyond = mask + 1 - infinite
    first = int(((magnitude - 1) & mask).amin()) + 1
    last = int(((magnitude + beyond) & mask).amax()) - beyond
    return min(first, least), max(last, most)
