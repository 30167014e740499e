"""The fixed grid of HistogramObserver: bins of power-of-two width, straight from float32's bits.

The upper bits of a float32 (sign, exponent, first ``m`` bits of the mantissa) number a bin
``[k * 2**e, (k + 1) * 2**e)`` mirrored for negative values. The grid depends on nothing that was
measured, so counts on it add up exactly in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["count_keys", "edges", "merge_counts"]

_MANTISSA = 23
_INFINITE = 255  # the exponent field of infinities and NaN


def count_keys(values: Tensor, mantissa_bits: int) -> tuple[Tensor, Tensor]:
    """Count finite float32 ``values`` (any shape) per bin of the grid.

    Returns the keys of the bins that are not empty (int32, ascending: negative values first, from
    the smallest magnitude to the largest, then the others) and their counts (int64). Minus zero
    counts as zero.

    >>> count_keys(torch.tensor([1.0, 1.01, -1.0, float("inf")]), mantissa_bits=2)
    (tensor([-1540,   508], dtype=torch.int32), tensor([1, 2]))
    """
    half = (_INFINITE + 1) << mantissa_bits
    bits = (values.reshape(-1) + 0.0).contiguous().view(torch.int32)
    dense = torch.bincount((bits >> (_MANTISSA - mantissa_bits)) + half, minlength=2 * half)
    infinite = 1 << mantissa_bits
    dense[half - infinite : half] = 0  # negative infinity and NaN
    dense[2 * half - infinite :] = 0
    key = dense.nonzero().squeeze(1)
    return (key - half).to(torch.int32), dense[key]


def merge_counts(
    key: Tensor, count: Tensor, other_key: Tensor, other_count: Tensor
) -> tuple[Tensor, Tensor]:
    """Add two sparse histograms; keys stay ascending.

    >>> one, two = torch.tensor([1, 3], dtype=torch.int32), torch.tensor([3], dtype=torch.int32)
    >>> merge_counts(one, torch.tensor([5, 5]), two, torch.tensor([2]))
    (tensor([1, 3], dtype=torch.int32), tensor([5, 7]))
    """
    joined, place = torch.unique(torch.cat((key, other_key)), return_inverse=True)
    total = torch.zeros(joined.shape, dtype=torch.int64, device=joined.device)
    return joined, total.index_add_(0, place, torch.cat((count, other_count)))


def edges(key: Tensor, mantissa_bits: int, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper edge (float64 ``[k]`` each) of every bin, cut to the exact ``low``..``high``.

    The bins are in the order of ``key``, not of the edges.

    >>> key = torch.tensor([-1540, 508], dtype=torch.int32)
    >>> edges(key, 2, torch.tensor(-1.0), torch.tensor(1.01))
    (tensor([-1.,  1.], dtype=torch.float64), tensor([-1.0000,  1.0100], dtype=torch.float64))
    """
    half = (_INFINITE + 1) << mantissa_bits
    magnitude = torch.where(key < 0, key + half, key)
    near = _from_bits(magnitude, mantissa_bits)
    far = _from_bits(magnitude + 1, mantissa_bits)
    lower, upper = torch.where(key < 0, -far, near), torch.where(key < 0, -near, far)
    low, high = low.to(torch.float64), high.to(torch.float64)
    return lower.clamp(low, high), upper.clamp(low, high)


def _from_bits(magnitude: Tensor, mantissa_bits: int) -> Tensor:
    """The value with these upper bits; past the last finite bin it is 2**128, as float64."""
    value = (magnitude << (_MANTISSA - mantissa_bits)).view(torch.float32).to(torch.float64)
    return value.clamp(max=2.0**128)
