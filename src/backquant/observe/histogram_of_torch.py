"""The range that ``torch.ao``'s HistogramObserver takes of its histogram, which has bins of one width.

Such a histogram says how many values a bin held, not which: its counts cannot be put on the grid of ours
without a guess. So a loaded one is kept as it is, and read as PyTorch reads it: from both ends a bin is cut
off after the other, always at the end where the least values go, until the error grows.

The arithmetic is that of PyTorch, in float32 where it has tensors, so that the same bin is the last one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_SHARE = 1e-5  # of the values, by which an end moves


def torchs_range(counts: Tensor, low: Tensor, high: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Both ends (float32 ``[]``), for ``levels`` integers.

    Args:
        counts: float32 ``[bins]``.
        low, high: the extremes (``[]``), the edges of the first and the last bin.

    >>> counts = torch.tensor([1e6, 0, 0, 0, 0, 0, 0, 1])
    >>> [end.item() for end in torchs_range(counts, torch.tensor(0.0), torch.tensor(8.0), 256)]
    [0.0, 1.0]
    """
    width = (high - low) / len(counts)
    sums = torch.cumsum(counts, 0).cpu().numpy()
    first, last = _kept_bins(sums, torch.sum(counts).item(), _error_of(counts, low, high, levels))
    return low + width * first, low + width * (last + 1)


def _kept_bins(
    sums: np.ndarray[tuple[int], np.dtype[np.float32]],
    total: float,
    error: Callable[[int, int], float],
) -> tuple[int, int]:
    """The first and the last bin of the range; ``sums``: of the counts up to each bin."""
    first, last, least = 0, len(sums) - 1, math.inf
    below, above = 0.0, 1.0  # the shares of values at which the ends are looked for
    while below < above:
        lower, upper = below + _SHARE, above - _SHARE
        left = first + int(np.searchsorted(sums[first:last], np.float32(lower * total), "left"))
        beyond = np.searchsorted(sums[first + 1 : last + 1], np.float32(upper * total), "right")
        right = first + int(beyond)
        if left - first > last - right:
            ends, below = (left, last), lower
        else:
            ends, above = (first, right), upper
        if ends == (first, last):
            continue
        found = error(*ends)
        if found > least:
            break
        (first, last), least = ends, found
    return first, last


def _error_of(
    counts: Tensor, low: Tensor, high: Tensor, levels: int
) -> Callable[[int, int], float]:
    """The squared error of a range of bins, values lying evenly in theirs."""
    width = (high.item() - low.item()) / len(counts)
    density, places = counts / width, torch.arange(len(counts), device=counts.device)

    def below(edge: Tensor | float) -> Tensor:
        cube = torch.as_tensor(edge, dtype=torch.float32)
        return cube * cube * cube

    def error(first: int, last: int) -> float:
        step = width * (last - first + 1) / levels
        if step == 0.0:
            return 0.0
        begin = (places - first) * width
        end = begin + width
        levels_of = [
            torch.div(edge, step, rounding_mode="floor").clamp(0, levels - 1)
            for edge in (begin, end)
        ]
        half = step / 2
        from_centre = begin - (levels_of[0] + 0.5) * step
        to_centre = end - (levels_of[1] * step + half)
        parts = torch.zeros_like(counts)
        parts += density * ((below(half) - below(from_centre)) / 3)
        whole = density * ((below(half) - below(-half)) / 3)
        parts += (levels_of[1] - levels_of[0] - 1) * whole
        parts += density * ((below(to_centre) - below(-half)) / 3)
        return parts.sum().item()

    return error
