"""The fixed grid of HistogramObserver: bins of power-of-two width, straight from float32's bits.

The upper bits of a float32 (sign, exponent, first ``m`` bits of the mantissa) number a bin
``[k * 2**e, (k + 1) * 2**e)``, mirrored for negative values. The grid depends on nothing that was
measured. Count, minimum and maximum of a bin depend on the values in it alone, so bins add up
exactly in any order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Bins", "count_bins", "merge_bins"]

_MANTISSA = 23
_INFINITE = 255  # the exponent field of infinities and NaN


class Bins(NamedTuple):
    """The bins that are not empty: four tensors of one length.

    ``key`` (int32, ascending): the upper bits as a number, negative for negative values;
    ``number`` (int64): how many values; ``low``, ``high`` (float32): smallest and largest value in the bin.
    """

    key: Tensor
    number: Tensor
    low: Tensor
    high: Tensor


def count_bins(values: Tensor, mantissa_bits: int) -> Bins:
    """Sort finite float32 ``values`` (any shape) into the grid; NaN and infinities are left out.

    >>> bins = count_bins(torch.tensor([1.0, 1.01, -1.0, float("inf")]), mantissa_bits=2)
    >>> bins.number.tolist(), bins.low.tolist()
    ([1, 2], [-1.0, 1.0])
    """
    half = (_INFINITE + 1) << mantissa_bits
    values = values.reshape(-1) + 0.0  # contiguous; minus zero becomes zero
    place = (values.view(torch.int32) >> (_MANTISSA - mantissa_bits)).to(torch.int64).add_(half)
    count = torch.bincount(place, minlength=2 * half)
    infinite = 1 << mantissa_bits
    count[half - infinite : half] = 0
    count[2 * half - infinite :] = 0
    key = count.nonzero().squeeze(1)
    empty = values.new_full((2 * half,), float("inf"))
    low = empty.scatter_reduce(0, place, values, "amin")
    high = (-empty).scatter_reduce(0, place, values, "amax")
    return Bins((key - half).to(torch.int32), count[key], low[key], high[key])


def merge_bins(one: Bins, two: Bins) -> Bins:
    """The bins of the values of both.

    >>> one, two = (count_bins(torch.tensor([x]), 2) for x in (1.0, 1.01))
    >>> merge_bins(one, two).number
    tensor([2])
    """
    key, place = torch.unique(torch.cat((one.key, two.key)), return_inverse=True)
    count = torch.zeros(key.shape, dtype=torch.int64, device=key.device)
    low = one.low.new_full(key.shape, float("inf"))
    return Bins(
        key,
        count.index_add_(0, place, torch.cat((one.number, two.number))),
        low.scatter_reduce(0, place, torch.cat((one.low, two.low)), "amin"),
        (-low).scatter_reduce(0, place, torch.cat((one.high, two.high)), "amax"),
    )
