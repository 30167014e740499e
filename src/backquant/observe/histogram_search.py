"""Search for the range that quantizes a histogram with the least squared error.

Two error models, both taking the values of a bin as spread evenly over its width (which is exact
where a bin holds one value, and has no width):

1. a *sketch*, for hundreds of ranges at once: squared distance of what is clipped, plus
   scale**2 / 12 for what is rounded, plus x**2 for what rounds to zero. From running sums.
2. the *squared error*, for the few best of them: the integral over every bin of the squared
   difference to the nearest quantized value, with the rounded zero point.

A search is about two hundred operations on some hundred numbers each, whose time is that of calling
them: numpy's are called in a fifth of the time of torch's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from backquant.observe.histogram_grid import Array, Spread
from backquant.observe.qparams import QuantRange, array_qparams, is_symmetric

__all__ = ["best_range", "squared_error"]


def _factors(least: float, most: float, many: int) -> Array:
    return np.exp2(np.linspace(least, most, many))


# Rounds of the search: factors that the ends are multiplied with, between powers of two. When both
# ends move, all pairs are tried.
_TWO_ENDS = (_factors(-8.0, 0.0, 17), _factors(-0.5, 0.5, 17), _factors(-0.0625, 0.0625, 9))
# One end is zero, or mirrors the other.
_ONE_END = (_factors(-8.0, 0.0, 65), _factors(-0.125, 0.125, 33))
# Ranges that get the exact error: a few in the last round; with few bins, more and in every round.
_EXAMINED = 6
_EXAMINED_BINS = 1 << 13  # bins times ranges


def best_range(values: Spread, target: QuantRange, eps: float) -> Array:
    """The range (float32 ``[2]``) whose qparams lose least on ``values`` (at least one).

    Args: ``eps``: the smallest scale. The extremes, as they are, are kept unless a narrower range
    has a smaller error.

    >>> import torch
    >>> points = np.arange(256.0)
    >>> target = QuantRange(torch.quint8, torch.per_tensor_affine, 0, 255)
    >>> best_range(Spread(points, points, np.ones_like(points)), target, 1e-7).tolist()
    [0.0, 255.0]
    """
    with np.errstate(all="ignore"):
        return _best(values, target, eps).astype(np.float32)


def _best(values: Spread, target: QuantRange, eps: float) -> Array:
    sketch = _Sketch.of(values, float(target.quant_max - target.quant_min))
    error = _Error.of(values)
    extremes = np.array((min(values.lower[0], 0.0), max(values.upper[-1], 0.0)))
    if is_symmetric(target.qscheme):
        extremes = np.abs(extremes).max() * np.array((-1.0, 1.0))
    one_end = is_symmetric(target.qscheme) or not extremes.all()
    rounds = _ONE_END if one_end else _TWO_ENDS
    examined = max(_EXAMINED, _EXAMINED_BINS // len(values.number))
    best = extremes
    for number, factors in enumerate(rounds, 1):
        ranges = best[:, None] * factors
        sketched = sketch.of_ranges(*ranges) if one_end else sketch.of_pairs(*ranges)
        if number < len(rounds) and examined == _EXAMINED:
            best = _ranges(ranges, np.array([sketched.argmin()]), one_end)[:, 0]
            continue
        promising = np.argsort(sketched, kind="stable")[:examined]
        found = _ranges(ranges, promising, one_end)
        found = np.concatenate((extremes[:, None], best[:, None], found), 1)
        narrow = found.astype(np.float32)
        scale, zero_point = array_qparams(narrow[0], narrow[1], target, eps)
        best = found[:, error(scale, zero_point, target).argmin()]  # the first of equals
    return best


def _ranges(ends: Array, chosen: Array, one_end: bool) -> Array:
    """The chosen ranges (``[2, n]``); of pairs of ends, the second runs faster."""
    if one_end:
        return ends[:, chosen]
    first, second = np.divmod(chosen, ends.shape[1])
    return np.stack((ends[0, first], ends[1, second]))


def squared_error(
    values: Spread, scale: Tensor | Array, zero_point: Tensor | Array, target: QuantRange
) -> Array:
    """Sum of squared quantization errors of a histogram, for each of several qparams.

    Args: ``scale`` and ``zero_point`` (``[n]``). Returns float64 ``[n]``; infinite where it
    overflows.

    With t = x / scale and n the nearest admitted integer, the squared error in t has the
    antiderivative n / 12 + (t - n)**3 / 3, inside and outside of the range alike.

    >>> import torch
    >>> values = Spread(np.zeros(1), np.ones(1), np.ones(1))
    >>> target = QuantRange(torch.quint8, torch.per_tensor_affine, 0, 255)
    >>> (squared_error(values, np.array([0.01]), np.array([0]), target) * 12).round(6).tolist()
    [0.0001]
    """
    with np.errstate(all="ignore"):
        return _Error.of(values)(np.asarray(scale), np.asarray(zero_point), target)


@dataclass(frozen=True)
class _Error:
    """Error model 2. ``edges``: lower, then upper edges of the bins that have a width, and
    ``density``: the weight per length of each, negative for the lower ones. ``points`` and
    ``number``: the values of the others, and their weights."""

    edges: Array
    density: Array
    points: Array
    number: Array

    @staticmethod
    def of(values: Spread) -> _Error:
        lower, upper, weight = values
        wide = upper > lower
        if wide.all():
            density = weight / (upper - lower)
            none = weight[:0]
            return _Error(
                np.concatenate((lower, upper)), np.concatenate((-density, density)), none, none
            )
        points, number = upper[~wide], weight[~wide]
        lower, upper = lower[wide], upper[wide]
        density = weight[wide] / (upper - lower)
        edges = np.concatenate((lower, upper))
        return _Error(edges, np.concatenate((-density, density)), points, number)

    def __call__(self, scale: Array, zero_point: Array, target: QuantRange) -> Array:
        step, zero = scale.astype(np.float64), zero_point.astype(np.float64)
        least, most = target.quant_min - zero, target.quant_max - zero
        nearest, rest = _rounded(self.edges, step, least, most)
        cubes = rest * rest
        cubes *= rest
        cubes *= 4.0
        cubes += nearest
        error = (cubes @ self.density) * (step**3 / 12)
        if len(self.points):
            rest = _rounded(self.points, step, least, most)[1]
            rest *= rest
            error += (rest @ self.number) * step**2
        return np.where(np.isnan(error), np.inf, error)


def _rounded(x: Array, step: Array, least: Array, most: Array) -> tuple[Array, Array]:
    """The nearest admitted integers of ``x / step`` (``[n, k]``), and the differences to them."""
    t = x / step[:, None]
    nearest = np.rint(t)
    np.maximum(nearest, least[:, None], out=nearest)
    np.minimum(nearest, most[:, None], out=nearest)
    t -= nearest
    return nearest, t


@dataclass(frozen=True)
class _Sketch:
    """Error model 1. ``rows`` has, of each bin, lower and upper edge, density, weight if it is a
    point, and the sums of weight, value and value**2 below it; a row without weight precedes them.
    """

    lower: Array
    rows: Array
    total: Array
    span: float

    @staticmethod
    def of(values: Spread, span: float) -> _Sketch:
        lower, upper, weight = values
        mean, width = (lower + upper) / 2, upper - lower
        moments = np.stack((weight, weight * mean, weight * (mean * mean + width * width / 12)))
        sums = moments.cumsum(1)
        rows = np.zeros((7, len(weight) + 1))
        rows[0, 1:], rows[1, 1:] = lower, upper
        wide = width > 0
        np.divide(weight, width, out=rows[2, 1:], where=wide)
        np.multiply(weight, ~wide, out=rows[3, 1:])
        np.subtract(sums, moments, out=rows[4:, 1:])
        return _Sketch(lower, rows, sums[:, -1], span)

    def of_ranges(self, low: Array, high: Array) -> Array:
        """The errors of the ranges (``[n]`` each) from ``low`` to ``high``."""
        half = (high - low) / (2 * self.span)
        sums = self._up_to(np.concatenate((low, high, -half, half))).reshape(3, 4, len(low))
        below = low, sums[:, 0]
        above = high, sums[:, 1]
        return self._error(below, above, half, sums[:, 2:])

    def of_pairs(self, low: Array, high: Array) -> Array:
        """The errors of all ranges from one of ``low`` to one of ``high``; the second runs faster."""
        half = (high - low[:, None]) / (2 * self.span)
        inner = half.ravel()
        sums = self._up_to(np.concatenate((low, high, -inner, inner)))
        count = len(low)
        below = low[:, None], sums[:, :count, None]
        above = high, sums[:, None, count : 2 * count]
        middle = sums[:, 2 * count :].reshape(3, 2, *half.shape)
        return self._error(below, above, half, middle).ravel()

    def _error(self, below: Any, above: Any, half: Array, middle: Array) -> Array:
        """``below`` and ``above``: ends, each with the sums up to it; ``middle``: the sums up to half
        a step below and above zero; of shapes that broadcast."""
        (low, (low_number, low_first, low_second)) = below
        (high, (high_number, high_first, high_second)) = above
        (number, _, second) = middle
        all_number, all_first, all_second = self.total
        clipped = np.maximum(low_second - low * (2 * low_first - low * low_number), 0)
        beyond = 2 * (all_first - high_first) - high * (all_number - high_number)
        clipped = clipped + np.maximum(all_second - high_second - high * beyond, 0)
        rounded: Array = np.maximum(number[0] - low_number, 0) + np.maximum(
            high_number - number[1], 0
        )
        rounded *= half
        rounded *= half
        rounded /= 3
        rounded += second[1]
        rounded -= second[0]
        rounded += clipped
        return rounded

    def _up_to(self, x: Array) -> Array:
        """Sums of weight, value and value**2 (``[3, n]``) over the values less than ``x`` (``[n]``)."""
        rows = self.rows.take(self.lower.searchsorted(x), axis=1)
        low, high, density, point = rows[:4]
        x = np.minimum(np.maximum(x, low), high)
        part, mean = density * (x - low) + point, (low + x) / 2
        sums = rows[4:]
        sums[0] += part
        sums[1] += part * mean
        part /= 3
        part *= 4 * mean * mean - low * x
        sums[2] += part
        return sums
