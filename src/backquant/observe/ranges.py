"""Smallest and largest finite value of a tensor, whole or per channel."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from backquant.errors import CalibrationError, ConfigError


class FiniteRange(NamedTuple):
    """Extremes of the finite values, (inf, -inf) where there is none, and how many others there are."""

    low: Tensor
    high: Tensor
    ignored: int


def finite_range(x: Tensor) -> FiniteRange:
    """Smallest and largest finite value of float ``x`` (any shape), each of shape ``[]``.

    >>> finite_range(torch.tensor([[2.0, -1.0, float("nan")]]))
    FiniteRange(low=tensor(-1.), high=tensor(2.), ignored=1)
    """
    if x.numel() == 0:
        return _nothing(x, 0)
    low, high = torch.aminmax(x)
    if all_finite(low, high):
        return FiniteRange(low, high, 0)
    kept = x[torch.isfinite(x)]
    ignored = x.numel() - kept.numel()
    if kept.numel() == 0:
        return _nothing(x, ignored)
    return FiniteRange(*torch.aminmax(kept), ignored)


def all_finite(low: Tensor, high: Tensor) -> bool:
    """Whether two extremes (``[]``) say that everything between is finite; False in doubt.

    One wait for the device. Doubt: two finite extremes whose difference overflows.

    >>> all_finite(torch.tensor(0.0), torch.tensor(1.0)), all_finite(*torch.tensor([0.0, torch.nan]))
    (True, False)
    """
    return math.isfinite((high - low).item())


def channel_range(x: Tensor, axis: int) -> FiniteRange:
    """Smallest and largest finite value of every channel, each of shape ``[x.size(axis)]``.

    Raises ConfigError when ``x`` has no such axis.

    >>> low, high, _ = channel_range(torch.tensor([[2.0, -1.0], [3.0, 4.0]]), 0)
    >>> low, high
    (tensor([-1.,  3.]), tensor([2., 4.]))
    """
    if not -x.dim() <= axis < x.dim():
        raise ConfigError(
            f"a tensor of {x.dim()} dimensions has no channel axis {axis}",
            where=f"shape {list(x.shape)}, ch_axis={axis}",
            fix=f"use an observer with ch_axis between {-x.dim()} and {x.dim() - 1}",
        )
    others = [dim for dim in range(x.dim()) if dim != axis % x.dim()]
    if not others:
        others, x = [1], x.unsqueeze(1)
    low, high = x.amin(others), x.amax(others)  # each is vectorised, unlike aminmax(dim=...)
    if bool(torch.isfinite(high - low).all()):
        return FiniteRange(low, high, 0)
    finite = torch.isfinite(x)
    low = x.masked_fill(~finite, math.inf).amin(others)
    high = x.masked_fill(~finite, -math.inf).amax(others)
    return FiniteRange(low, high, x.numel() - int(finite.sum()))


def check_channels(before: Tensor, now: Tensor, axis: int) -> None:
    """Raise CalibrationError when the number of channels changed between batches."""
    if before.shape != now.shape:
        raise CalibrationError(
            f"a per-channel observer saw {before.numel()} channels and now {now.numel()}",
            where=f"ch_axis={axis}",
            fix="feed tensors with one number of channels, or choose the axis that is constant",
        )


def _nothing(x: Tensor, ignored: int) -> FiniteRange:
    return FiniteRange(x.new_tensor(math.inf), x.new_tensor(-math.inf), ignored)
