"""Smallest and largest finite value of a tensor, whole or per channel."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from backquant.errors import CalibrationError, ConfigError

__all__ = ["channel_range", "finite_range"]


def finite_range(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Smallest and largest finite value of ``x`` (any shape), each of shape ``[]``.

    None when there is no finite value. NaN and infinite values are left out, with a warning.

    >>> finite_range(torch.tensor([[2.0, -1.0]]))
    (tensor(-1.), tensor(2.))
    >>> finite_range(torch.empty(0)) is None
    True
    """
    if x.numel() == 0:
        return None
    low, high = torch.aminmax(x)
    if bool(torch.isfinite(low) & torch.isfinite(high)):
        return low, high
    kept = x[torch.isfinite(x)]
    warn_not_finite()
    if kept.numel() == 0:
        return None
    low, high = torch.aminmax(kept)
    return low, high


def channel_range(x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest finite value of every channel, each of shape ``[x.size(axis)]``.

    NaN and infinite values are left out, with a warning; a channel without a finite value gives
    (inf, -inf). Raises ConfigError when ``x`` has no such axis.

    >>> channel_range(torch.tensor([[2.0, -1.0], [3.0, 4.0]]), 0)
    (tensor([-1.,  3.]), tensor([2., 4.]))
    """
    if not -x.dim() <= axis < x.dim():
        raise ConfigError(
            f"a tensor of {x.dim()} dimensions has no channel axis {axis}",
            where=f"shape {list(x.shape)}, ch_axis={axis}",
            fix=f"use an observer with ch_axis between {-x.dim()} and {x.dim() - 1}",
        )
    rows = x.transpose(0, axis).flatten(1) if x.dim() > 1 else x.reshape(-1, 1)
    low, high = torch.aminmax(rows, dim=1)
    if bool((torch.isfinite(low) & torch.isfinite(high)).all()):
        return low, high
    finite = torch.isfinite(rows)
    low = rows.masked_fill(~finite, float("inf")).amin(1)
    high = rows.masked_fill(~finite, float("-inf")).amax(1)
    warn_not_finite()
    return low, high


def check_channels(before: Tensor, now: Tensor, axis: int) -> None:
    """Raise CalibrationError when the number of channels changed between batches.

    >>> check_channels(torch.zeros(3), torch.zeros(3), 0)
    """
    if before.shape != now.shape:
        raise CalibrationError(
            f"a per-channel observer saw {before.numel()} channels and now {now.numel()}",
            where=f"ch_axis={axis}",
            fix="feed tensors with one number of channels, or choose the axis that is constant",
        )


def warn_not_finite() -> None:
    """Warn that values were left out of a measured range.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn_not_finite()
    >>> len(caught)
    1
    """
    warnings.warn(
        "an observer saw NaN or infinite values; it measures the finite ones only",
        category=RuntimeWarning,
        stacklevel=2,
    )
