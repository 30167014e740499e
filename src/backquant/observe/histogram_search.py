"""Search for the range that quantizes a histogram with the least squared error.

Two error models, both taking values as spread evenly from the smallest to the largest of their bin
(which is exact where a bin holds one value):

1. a *sketch*, for a thousand ranges at once: squared distance of what is clipped, plus
   scale**2 / 12 for what is rounded, plus x**2 for what rounds to zero. From running sums.
2. the *squared error*, for the few best of them: the integral over every bin of the squared
   difference to the nearest quantized value, with the rounded zero point.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backquant.observe.histogram_grid import Bins
from backquant.observe.qparams import QuantRange, affine_qparams, is_symmetric

__all__ = ["best_range", "squared_error"]

# Rounds of the search: the factors that the ends are multiplied with, as powers of two.
_ROUNDS = ((-8.0, 0.0), (-0.125, 0.125))
_TWO_ENDS = (65, 25)  # factors per end and round, when both ends move
_ONE_END = (1025, 769)  # the same when one end is zero or mirrors the other
_EXAMINED = 1 << 15  # bins times ranges, per round, that get the exact error
_AT_ONCE = 1 << 20  # bins times ranges that are held in memory


def best_range(bins: Bins, target: QuantRange, eps: Tensor) -> tuple[Tensor, Tensor]:
    """The range (float32 ``[]`` each) whose qparams lose least on the histogram.

    Args: ``bins``: at least one; ``eps`` (``[1]``): the smallest scale. The extremes, as they
    are, are kept unless a narrower range has a smaller error.

    >>> from backquant.observe.histogram_grid import count_bins
    >>> target = QuantRange(torch.quint8, torch.per_tensor_affine, 0, 255)
    >>> best_range(count_bins(torch.arange(256.0), 8), target, torch.tensor([1e-7]))
    (tensor(0.), tensor(255.))
    """
    order = torch.argsort(bins.low)
    lower, upper, weight = (b[order].to(torch.float64) for b in (bins.low, bins.high, bins.number))
    sketch = _Sketch.of(lower, upper, weight, float(target.quant_max - target.quant_min))
    best = torch.stack((lower[0].clamp(max=0), upper[-1].clamp(min=0)))
    if is_symmetric(target.qscheme):
        best = best.abs().max() * best.new_tensor([-1.0, 1.0])
    one_end = is_symmetric(target.qscheme) or bool((best == 0).any())
    examined = max(32, _EXAMINED // weight.numel())

    def error(ranges: Tensor) -> Tensor:
        scale, zero_point = affine_qparams(ranges[:, 0].float(), ranges[:, 1].float(), target, eps)
        return squared_error((lower, upper), weight, scale, zero_point, target)

    for (least, most), many in zip(_ROUNDS, _ONE_END if one_end else _TWO_ENDS, strict=True):
        factors = 2.0 ** torch.linspace(least, most, many, dtype=best.dtype, device=best.device)
        ends = best[:, None] * factors
        ranges = ends.t() if one_end else torch.cartesian_prod(ends[0], ends[1])
        promising = torch.topk(sketch(ranges), min(examined, len(ranges)), largest=False).indices
        ranges = torch.cat((best[None], ranges[promising]))
        best = ranges[torch.argmin(error(ranges))]  # the first of equals
    low, high = best.to(torch.float32).unbind()
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
    chunk = max(1, _AT_ONCE // max(1, weight.numel()))
    results = []
    for start in range(0, scale.numel(), chunk):
        step = scale[start : start + chunk, None].to(torch.float64)
        zero = zero_point[start : start + chunk, None].to(torch.float64)
        ends = []
        for edge in bins:
            t = edge / step
            nearest = torch.round(t).clamp(target.quant_min - zero, target.quant_max - zero)
            ends.append((t, t - nearest, nearest / 12 + (t - nearest) ** 3 / 3))
        (t_low, _, g_low), (t_high, rest, g_high) = ends
        mean = torch.where(t_high > t_low, (g_high - g_low) / (t_high - t_low), rest**2)
        results.append((mean * weight).sum(1) * step[:, 0] ** 2)
    return torch.cat(results).nan_to_num(nan=float("inf"))


@dataclass(frozen=True)
class _Sketch:
    """Running sums of weight, x and x**2 up to every bin, bins ascending: error model 1."""

    lower: Tensor
    upper: Tensor
    weight: Tensor
    sums: Tensor  # [3, k + 1]
    span: float

    @staticmethod
    def of(lower: Tensor, upper: Tensor, weight: Tensor, span: float) -> _Sketch:
        first = weight * (lower + upper) / 2
        second = weight * (lower**2 + lower * upper + upper**2) / 3
        sums = torch.stack((weight, first, second)).cumsum(1)
        return _Sketch(lower, upper, weight, torch.nn.functional.pad(sums, (1, 0)), span)

    def __call__(self, ranges: Tensor) -> Tensor:
        low, high = ranges.t().contiguous()
        step = (high - low) / self.span
        total = self.sums[:, -1:]
        below, above = self._up_to(low), total - self._up_to(high)
        near_zero = self._up_to(step / 2) - self._up_to(-step / 2)
        rounded = total[0] - below[0] - above[0] - near_zero[0]
        clipped = _around(below, low) + _around(above, high)
        error: Tensor = clipped + rounded.clamp(min=0) * step**2 / 12 + near_zero[2]
        return error

    def _up_to(self, x: Tensor) -> Tensor:
        """The sums over values less than ``x`` ([n]): [3, n]."""
        place = torch.searchsorted(self.upper, x).clamp(max=len(self.upper) - 1)
        low, high = self.lower[place], self.upper[place]
        full = x >= high
        x = x.clamp(low, high)
        width = (high - low).clamp(min=torch.finfo(torch.float64).tiny)
        part = self.weight[place] * (x - low) / width
        within = torch.stack((part, part * (low + x) / 2, part * (low**2 + low * x + x**2) / 3))
        return torch.where(full, self.sums[:, place + 1], self.sums[:, place] + within)


def _around(sums: Tensor, x: Tensor) -> Tensor:
    """Sum of (value - x)**2 from the sums of weight, value and value**2."""
    distance: Tensor = sums[2] - 2 * x * sums[1] + x**2 * sums[0]
    return distance.clamp(min=0)
