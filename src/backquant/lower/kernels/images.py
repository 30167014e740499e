"""Images of 8-bit integers between convolutions by the library of kernels (``backquant.native``), where it is
here: means, maxima, products with one number a channel, and batch norms.

Each function returns None for what the library does not compute; the caller then runs PyTorch's kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backquant.lower.kernels.prepared import channels_last, is_plain
from backquant.native.library import is_here

_Numbers = tuple[float, int]  # scale and zero point


def _is_image(x: torch.Tensor) -> bool:
    known = x.dim() == 4 and x.dtype == torch.uint8 and is_plain(x)
    return known and x.shape[2] * x.shape[3] > 1 and is_here()


def averaged(x: torch.Tensor) -> torch.Tensor | None:
    """The mean of each channel, ``[batch, channels, 1, 1]``, in the integers of ``x``.

    >>> averaged(torch.ones(1, 1, 2, 2)) is None  # floats
    True
    """
    return torch.ops.backquant_kernels.averaged.default(channels_last(x)) if _is_image(x) else None


def maxima(
    x: torch.Tensor, window: tuple[Sequence[int], Sequence[int], Sequence[int]], ceil_mode: bool
) -> torch.Tensor | None:
    """The maxima of each channel in windows, ``[batch, channels, rows, columns]``; ``window``: their sizes,
    steps and padding, two numbers each.

    >>> maxima(torch.ones(1, 1, 2, 2), ([2, 2], [2, 2], [0, 0]), False) is None  # floats
    True
    """
    if not _is_image(x):
        return None
    numbers = [number for pair in window for number in pair]
    return torch.ops.backquant_kernels.maxima.default(channels_last(x), *numbers, ceil_mode)  # type: ignore[no-any-return]


def gated(
    x: torch.Tensor, x_of: _Numbers, y: torch.Tensor, y_of: _Numbers, out: _Numbers, low: int
) -> torch.Tensor | None:
    """The product of an image and one number a channel, in either order; integers from ``low`` on."""
    if not _is_gate(x, y):
        x, x_of, y, y_of = y, y_of, x, x_of
        if not _is_gate(x, y):
            return None
    numbers = (float(x_of[1]), float(y_of[1]), x_of[0] * y_of[0] / out[0], float(out[1]), low)
    return torch.ops.backquant_kernels.gated.default(channels_last(x), channels_last(y), *numbers)  # type: ignore[no-any-return]


def _is_gate(x: torch.Tensor, y: torch.Tensor) -> bool:
    same = y.dim() == 4 and y.dtype == torch.uint8 and _is_image(x) and is_plain(y)
    return same and tuple(y.shape) == (*x.shape[:2], 1, 1)


def rescaled(x: torch.Tensor, numbers: torch.Tensor, low: int) -> torch.Tensor | None:
    """``x * scale + shift`` by channel, integers from ``low`` on. ``numbers``: the scales, then the shifts,
    each with room for 16 more.
    """
    run = torch.ops.backquant_kernels
    return run.rescaled.default(channels_last(x), numbers, low) if _is_image(x) else None
