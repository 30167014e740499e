"""Ranges that are read off a histogram of values: percentiles, and the least loss of information."""

from __future__ import annotations

import numpy as np

from backquant.observe.histogram_grid import Array, Spread

_BINS = 2048  # of absolute values, for the entropy
_STEP = 16


def percentile_range(values: Spread, percent: float) -> tuple[float, float]:
    """The range that holds ``percent`` of the values, half of the others beyond each end; zero is in it.

    >>> points = np.arange(-50.0, 51.0)
    >>> percentile_range(Spread(points, points, np.ones(101)), 90.0)
    (-45.0, 45.0)
    """
    below = np.cumsum(values.number) / values.number.sum()
    tail = (100 - percent) / 200
    low = values.lower[np.searchsorted(below, tail, side="right")]
    high = values.upper[np.searchsorted(below, 1 - tail, side="left")]
    return min(float(low), 0.0), max(float(high), 0.0)


def entropy_range(values: Spread, levels: int) -> tuple[float, float]:
    """The range, up to one absolute value on both sides, whose rounded form has the least Kullback-Leibler
    divergence from the values. ``levels``: of the integers.

    Source: S. Migacz, "8-bit Inference with TensorRT", GTC 2017.
    """
    low, high = float(values.lower[0]), float(values.upper[-1])
    counts, width = _absolute(values)
    if low < 0 < high:
        levels = max(2, levels // 2)
    ends = range(min(levels, _BINS), _BINS + 1, _STEP)
    end = min(ends, key=lambda end: divergence(counts, end, levels)) * width
    return max(low, -end) if low < 0 else 0.0, min(high, end) if high > 0 else 0.0


def divergence(counts: Array, end: int, levels: int) -> float:
    """The divergence of ``counts``, clipped at bin ``end``, from the same in ``levels`` equal parts.

    >>> divergence(np.array([2.0, 2.0, 1.0, 1.0]), 4, 2), divergence(np.array([3.0, 1.0]), 2, 2)
    (0.0, 0.0)
    """
    wanted = counts[:end].copy()
    filled = wanted > 0
    part = np.arange(end) * levels // end
    total = np.bincount(part, wanted, levels)
    members = np.maximum(np.bincount(part, filled, levels), 1)
    made = (total / members)[part] * filled
    wanted[-1] += counts[end:].sum()
    held = (wanted > 0) & (made > 0)
    if wanted[-1] > 0 and not held[-1]:
        return float("inf")  # what is clipped would be in a part that nothing is in
    p, q = wanted[held] / wanted.sum(), made[held] / made.sum()
    return float((p * np.log(p / q)).sum())


def _absolute(values: Spread) -> tuple[Array, float]:
    """Counts of absolute values in equal bins up to the largest, and the width of one."""
    most = max(abs(float(values.lower[0])), abs(float(values.upper[-1])))
    edges = np.linspace(0, most, _BINS + 1)
    ends = np.concatenate(([values.lower[0]], np.maximum.accumulate(values.upper)))
    sums = np.concatenate(([0.0], np.cumsum(values.number)))
    above = np.interp(edges, ends, sums)
    below = np.interp(-edges, ends, sums)
    inner = np.maximum(np.diff(above - below), 0)
    return inner, most / _BINS
