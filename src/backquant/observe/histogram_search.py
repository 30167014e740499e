"""Search for the range that quantizes a histogram with the least squared error.

Two error models, both taking the values of a bin as spread evenly over its width (which is exact
where a bin holds one value, and has no width):

1. a *sketch*, for hundreds of ranges at once: squared distance of what is clipped, plus
   scale**2 / 12 for what is rounded, plus x**2 for what rounds to zero. From running sums.
2. the *squared error*, for the few best of them: the integral over every bin of the squared
   difference to the nearest quantized value, with the rounded zero point.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backquant.observe.histogram_grid import Spread
from backquant.observe.qparams import QuantRange, affine_qparams, is_symmetric

__all__ = ["best_range", "squared_error"]

# Rounds of the search: powers of two of the least and the largest factor that the ends are
# multiplied with, and how many factors there are per end. When both ends move, all pairs are tried.
_TWO_ENDS = ((-8.0, 0.0, 17), (-0.5, 0.5, 17), (-0.0625, 0.0625, 9))
_ONE_END = ((-8.0, 0.0, 65), (-0.125, 0.125, 33))  # one end is zero, or mirrors the other
# Ranges that get the exact error: a few in the last round; with few bins, more and in every round.
_EXAMINED = 6
_EXAMINED_BINS = 1 << 14  # bins times ranges


def best_range(values: Spread, target: QuantRange, eps: Tensor) -> tuple[Tensor, Tensor]:
    """The range (float32 ``[]`` each) whose qparams lose least on ``values`` (at least one).

    Args: ``eps`` (``[1]``): the smallest scale. The extremes, as they are, are kept unless a
    narrower range has a smaller error.

    >>> points = torch.arange(256.0, dtype=torch.float64)
    >>> target = QuantRange(torch.quint8, torch.per_tensor_affine, 0, 255)
    >>> best_range(Spread(points, points, torch.ones_like(points)), target, torch.tensor([1e-7]))
    (tensor(0.), tensor(255.))
    """
    lower, upper, weight = values
    sketch = _Sketch.of(lower, upper, weight, float(target.quant_max - target.quant_min))
    extremes = torch.stack((lower[0].clamp(max=0), upper[-1].clamp(min=0)))
    if is_symmetric(target.qscheme):
        extremes = extremes.abs().max() * extremes.new_tensor([-1.0, 1.0])
    one_end = is_symmetric(target.qscheme) or bool((extremes == 0).any())
    rounds = _ONE_END if one_end else _TWO_ENDS
    examined = max(_EXAMINED, _EXAMINED_BINS // weight.numel())
    best = extremes
    for number, (least, most, many) in enumerate(rounds, 1):
        factors = torch.linspace(least, most, many, dtype=best.dtype, device=best.device).exp2_()
        low, high = best[:, None] * factors
        if not one_end:
            low, high = low.repeat_interleave(many), high.repeat(many)
        sketched = sketch(low, high)
        if number < len(rounds) and examined == _EXAMINED:
            best = torch.stack((low, high), 1)[sketched.argmin()]
            continue
        promising = sketched.topk(min(examined, len(sketched)), largest=False).indices
        ranges = torch.stack((low[promising], high[promising]))
        ranges = torch.cat((extremes[:, None], best[:, None], ranges), 1)
        starts, stops = ranges.to(torch.float32)
        scale, zero_point = affine_qparams(starts, stops, target, eps)
        error = squared_error((lower, upper), weight, scale, zero_point, target)
        best = ranges[:, error.argmin()]  # the first of equals
    low, high = best.to(torch.float32)
    return low, high


def squared_error(
    bins: tuple[Tensor, Tensor],
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    target: QuantRange,
) -> Tensor:
    """Sum of squared quantization errors of a histogram, for each of several qparams.

    Args: ``bins``: lower and upper edges (float64 ``[k]``); ``weight`` (float64 ``[k]``);
    ``scale`` and ``zero_point`` (``[n]``). Returns float64 ``[n]``; infinite where it overflows.

    With t = x / scale and n the nearest admitted integer, the squared error in t has the
    antiderivative n / 12 + (t - n)**3 / 3, inside and outside of the range alike.

    >>> bins = torch.tensor([0.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    >>> target = QuantRange(torch.quint8, torch.per_tensor_affine, 0, 255)
    >>> one = torch.ones(1, dtype=torch.float64)
    >>> squared_error(bins, one, one / 100, torch.tensor([0]), target) * 12
    tensor([0.0001], dtype=torch.float64)
    """
    density, points = _density(*bins, weight)
    step, zero = scale.to(torch.float64), zero_point.to(torch.float64)
    least, most = (target.quant_min - zero)[:, None], (target.quant_max - zero)[:, None]
    nearest, rest = [], []
    for edge in bins:
        t = edge / step[:, None]
        nearest.append(torch.minimum(torch.maximum(torch.round(t), least), most))
        rest.append(t.sub_(nearest[-1]))
    integral = (nearest[1] - nearest[0]) @ density / 12
    integral += (rest[1] ** 3 - rest[0] ** 3) @ density / 3
    error = integral * step**3 + (rest[1].square() @ points) * step**2
    return error.nan_to_num(nan=float("inf"))


def _density(lower: Tensor, upper: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weight per length of the bins that have a length, and the weight of those that have none."""
    width = upper - lower
    return torch.where(width > 0, weight / width, 0.0), torch.where(width > 0, 0.0, weight)


@dataclass(frozen=True)
class _Sketch:
    """Error model 1. ``rows`` has, of each bin, lower and upper edge, density, weight if it is a
    point, and the sums of weight, value and value**2 below it; a row without weight precedes them.
    """

    lower: Tensor
    rows: Tensor
    total: Tensor
    span: float

    @staticmethod
    def of(lower: Tensor, upper: Tensor, weight: Tensor, span: float) -> _Sketch:
        mean, width = (lower + upper) / 2, upper - lower
        moments = torch.stack((weight, weight * mean, weight * (mean**2 + width**2 / 12)))
        sums = moments.cumsum(1)
        density, points = _density(lower, upper, weight)
        columns = (lower, upper, density, points, *(sums - moments))
        rows = torch.nn.functional.pad(torch.stack(columns, 1), (0, 0, 1, 0))
        return _Sketch(lower, rows, sums[:, -1], span)

    def __call__(self, low: Tensor, high: Tensor) -> Tensor:
        """The error of the ranges (``[n]``) from ``low`` to ``high``."""
        step = (high - low) / self.span
        number, first, second = self._up_to(torch.stack((low, -step / 2, step / 2, high)))
        rounded = (number[1] - number[0]).clamp(min=0) + (number[3] - number[2]).clamp(min=0)
        to_zero = second[2] - second[1]
        all_number, all_first, all_second = self.total
        below = second[0] - low * (2 * first[0] - low * number[0])
        above = all_second - second[3]
        above -= high * (2 * (all_first - first[3]) - high * (all_number - number[3]))
        clipped: Tensor = below.clamp(min=0) + above.clamp(min=0)
        return clipped + rounded * step**2 / 12 + to_zero

    def _up_to(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of weight, value and value**2 over the values less than ``x`` (any shape)."""
        rows = self.rows[torch.searchsorted(self.lower, x)]
        low, high, density, point, number, first, second = rows.unbind(-1)
        x = torch.minimum(torch.maximum(x, low), high)
        part, mean = density * (x - low) + point, (low + x) / 2
        return number + part, first + part * mean, second + part * (4 * mean**2 - low * x) / 3
