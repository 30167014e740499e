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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backquant.dtypes import QuantRange, array_qparams
from backquant.observe.histogram_grid import Array, Spread


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
_TOGETHER = 16  # histograms in one search


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
    found: Array = best_ranges([values], target, eps)[0]
    return found


def best_ranges(values: Sequence[Spread], target: QuantRange, eps: float) -> Array:
    """``best_range`` of each of several histograms (``[n, 2]``): the same bits in half of the time.

    >>> import torch
    >>> points = np.arange(256.0)
    >>> target = QuantRange(torch.quint8, torch.per_tensor_affine, 0, 255)
    >>> several = [Spread(points, points, np.ones_like(points))] * 3
    >>> best_ranges(several, target, 1e-7)[2].tolist()
    [0.0, 255.0]
    """
    found = np.empty((len(values), 2), np.float32)
    extremes = [_extremes(each, target) for each in values]
    with np.errstate(all="ignore"):
        for one_end in (False, True):
            chosen = [i for i, ends in enumerate(extremes) if one_end == _has_one_end(ends, target)]
            chosen.sort(key=lambda i: len(values[i].number))
            for start in range(0, len(chosen), _TOGETHER):
                part = chosen[start : start + _TOGETHER]
                search = _Search([values[i] for i in part], target, eps, one_end=one_end)
                found[part] = search.run(np.stack([extremes[i] for i in part]))
    return found


def _extremes(values: Spread, target: QuantRange) -> Array:
    extremes = np.array((min(values.lower[0], 0.0), max(values.upper[-1], 0.0)))
    if target.is_symmetric:
        extremes = np.abs(extremes).max() * np.array((-1.0, 1.0))
    return extremes


def _has_one_end(extremes: Array, target: QuantRange) -> bool:
    return target.is_symmetric or not extremes.all()


class _Search:
    """A search in several histograms at once."""

    def __init__(
        self, values: Sequence[Spread], target: QuantRange, eps: float, *, one_end: bool
    ) -> None:
        self._target, self._eps = target, eps
        self._one_end = one_end
        self._sketch = _Sketch.of(values, float(target.quant_max - target.quant_min))
        self._errors = [SquaredError.of(each) for each in values]
        self._examined = [max(_EXAMINED, _EXAMINED_BINS // len(each.number)) for each in values]

    def run(self, extremes: Array) -> Array:
        """The best ranges; ``extremes`` (``[n, 2]``) hold all values."""
        best = extremes
        rounds = _ONE_END if self._one_end else _TWO_ENDS
        for number, factors in enumerate(rounds, 1):
            ends = best[:, :, None] * factors
            low, high = ends[:, 0], ends[:, 1]
            sketch = self._sketch
            errors = sketch.of_ranges(low, high) if self._one_end else sketch.of_pairs(low, high)
            promising = _smallest(errors, max(self._examined))
            found = np.concatenate(
                (extremes[:, :, None], best[:, :, None], self._ranges(ends, promising)), 2
            )
            if number < len(rounds) and max(self._examined) == _EXAMINED:
                best = found[:, :, 2]
            else:
                best = self._least(found, last=number == len(rounds))
        return best

    def _ranges(self, ends: Array, chosen: Array) -> Array:
        """The chosen ranges (``[n, 2, m]``); of pairs of ends, the second runs faster."""
        places = (chosen, chosen) if self._one_end else np.divmod(chosen, ends.shape[2])
        taken = [np.take_along_axis(ends[:, i], place, 1) for i, place in enumerate(places)]
        return np.stack(taken, 1)

    def _least(self, ranges: Array, *, last: bool) -> Array:
        """For each histogram the range with the least error, the first of equals."""
        narrow = ranges.astype(np.float32)
        scale, zero_point = array_qparams(narrow[:, 0], narrow[:, 1], self._target, self._eps)
        best = np.empty(ranges.shape[:2])
        for i, (examined, error) in enumerate(zip(self._examined, self._errors, strict=True)):
            if examined == _EXAMINED and not last:
                best[i] = ranges[i, :, 2]
                continue
            own = slice(2 + examined)
            least = error(scale[i, own], zero_point[i, own], self._target).argmin()
            best[i] = ranges[i, :, least]
        return best


def _smallest(errors: Array, many: int) -> Array:
    """Where the least errors of each row (``[n, m]``) stand, ascending; of those that are equal to 40
    bits the first."""
    count = errors.shape[1]
    places = (1 << count.bit_length()) - 1
    key = np.abs(errors).view(np.int64)  # in the order of the errors; NaN comes last
    key &= ~places
    key |= np.arange(count)
    if 4 * many < count:
        key = np.partition(key, many, axis=1)[:, :many]
    key.sort(axis=1)
    found: Array = key[:, :many] & places
    return found


@dataclass(frozen=True)
class SquaredError:
    """Error model 2: the sum of squared quantization errors of a histogram, for each of several qparams.

    With t = x / scale and n the nearest admitted integer, the squared error in t has the antiderivative
    n / 12 + (t - n)**3 / 3, inside and outside of the range alike. Infinite where it overflows.

    ``values``: the lower, then the upper edges of the bins that have a width, then the values of the
    others; ``density``: of the ``edges`` the weight per length, negative for the lower ones; ``number``:
    the weights of the others.
    """

    values: Array
    edges: int
    density: Array
    number: Array

    @staticmethod
    def of(values: Spread) -> SquaredError:
        lower, upper, weight = values
        wide = upper > lower
        points, number = upper[~wide], weight[~wide]
        lower, upper = lower[wide], upper[wide]
        density = weight[wide] / (upper - lower)
        joined = np.concatenate((lower, upper, points))
        return SquaredError(joined, 2 * len(lower), np.concatenate((-density, density)), number)

    def __call__(self, scale: Array, zero_point: Array, target: QuantRange) -> Array:
        step, zero = scale.astype(np.float64), zero_point.astype(np.float64)
        least, most = target.quant_min - zero, target.quant_max - zero
        nearest, rest = _rounded(self.values, step, least, most)
        edges, error = self.edges, np.zeros(len(step))
        squares = rest * rest
        if edges:
            cubes = squares[:, :edges] * rest[:, :edges]
            cubes *= 4.0
            cubes += nearest[:, :edges]
            error += (cubes @ self.density) * (step**3 / 12)
        if len(self.number):
            error += (squares[:, edges:] @ self.number) * step**2
        return np.where(np.isnan(error), np.inf, error)


def _rounded(x: Array, step: Array, least: Array, most: Array) -> tuple[Array, Array]:
    """The nearest admitted integers of ``x / step`` (``[n, k]``), and the differences to them."""
    t = x * (1 / step)[:, None]
    nearest = np.rint(t)
    np.maximum(nearest, least[:, None], out=nearest)
    np.minimum(nearest, most[:, None], out=nearest)
    t -= nearest
    return nearest, t


@dataclass(frozen=True)
class _Sketch:
    """Error model 1, of n histograms; shorter ones are filled up with bins that nothing reaches.

    ``lower`` (``[n, k]``): the lower edges. ``rows`` (``[7, n * (k + 1)]``) have, of each bin, lower
    and upper edge, density, weight if it is a point, and the sums of weight, value and value**2 below
    it; a column without weight precedes those of each histogram, ``offset`` (``[n, 1]``) counts what
    stands before it. ``total`` (``[3, n, 1]``): the sums of all.
    """

    lower: Tensor
    rows: Array
    offset: Array
    total: Array
    span: float

    @staticmethod
    def of(values: Sequence[Spread], span: float) -> _Sketch:
        count, longest = len(values), max(len(each.number) for each in values)
        lower, upper, weight = np.zeros((3, count, longest))
        reach = np.full((count, longest), np.inf)
        for i, each in enumerate(values):
            own = slice(len(each.number))
            lower[i, own], upper[i, own], weight[i, own] = each
            reach[i, own] = each.lower
        mean, width = (lower + upper) / 2, upper - lower
        moments = np.stack((weight, weight * mean, weight * (mean * mean + width * width / 12)))
        sums = moments.cumsum(2)
        rows = np.zeros((7, count, longest + 1))
        rows[0, :, 1:], rows[1, :, 1:] = lower, upper
        np.divide(weight, width, out=rows[2, :, 1:], where=width > 0)
        np.multiply(weight, width <= 0, out=rows[3, :, 1:])
        np.subtract(sums, moments, out=rows[4:, :, 1:])
        offset = np.arange(count)[:, None] * (longest + 1)
        flat = rows.reshape(7, count * (longest + 1))
        return _Sketch(torch.from_numpy(reach), flat, offset, sums[:, :, -1:], span)

    def of_ranges(self, low: Array, high: Array) -> Array:
        """The errors (``[n, m]``) of the ranges from ``low`` to ``high`` (``[n, m]``)."""
        half = (high - low) / (2 * self.span)
        sums = self._up_to(np.concatenate((low, high, -half, half), 1))
        sums = sums.reshape(3, len(low), 4, low.shape[1])
        below, above = (low, sums[:, :, 0]), (high, sums[:, :, 1])
        return self._error(below, above, half, (sums[:, :, 2], sums[:, :, 3]))

    def of_pairs(self, low: Array, high: Array) -> Array:
        """The errors (``[n, m * m]``) of all ranges from one of ``low`` to one of ``high`` (``[n, m]``);
        the second runs faster."""
        half = (high[:, None] - low[:, :, None]) / (2 * self.span)
        count, many = low.shape
        inner = half.reshape(count, many * many)
        sums = self._up_to(np.concatenate((low, high, -inner, inner), 1))
        below = low[:, :, None], sums[:, :, :many, None]
        above = high[:, None], sums[:, :, None, many : 2 * many]
        middle = sums[:, :, 2 * many :].reshape(3, count, 2, many, many)
        errors = self._error(below, above, half, (middle[:, :, 0], middle[:, :, 1]))
        return errors.reshape(count, many * many)

    def _error(self, below: Any, above: Any, half: Array, middle: Any) -> Array:
        """``below`` and ``above``: ends, each with the sums up to it; ``middle``: the sums up to half
        a step below, and above, zero; of shapes that broadcast."""
        (low, (low_number, low_first, low_second)) = below
        (high, (high_number, high_first, high_second)) = above
        ((start_number, _, start_second), (stop_number, _, stop_second)) = middle
        total = self.total.reshape(3, -1, *[1] * (half.ndim - 1))
        all_number, all_first, all_second = total
        clipped = np.maximum(low_second - low * (2 * low_first - low * low_number), 0)
        beyond = 2 * (all_first - high_first) - high * (all_number - high_number)
        clipped = clipped + np.maximum(all_second - high_second - high * beyond, 0)
        rounded: Array = np.maximum(start_number - low_number, 0)
        rounded += np.maximum(high_number - stop_number, 0)
        rounded *= half
        rounded *= half
        rounded /= 3
        rounded += stop_second
        rounded -= start_second
        rounded += clipped
        return rounded

    def _up_to(self, x: Array) -> Array:
        """Sums of weight, value and value**2 (``[3, n, m]``) over the values less than ``x``
        (``[n, m]``)."""
        place = torch.searchsorted(self.lower, torch.from_numpy(x)).numpy()
        rows = self.rows.take(place + self.offset, axis=1)
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
