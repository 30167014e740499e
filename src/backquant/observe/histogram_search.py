"""Search for the range that quantizes a histogram with the least squared error.

Two error models, both taking values as spread evenly inside of their bin:

1. a *sketch*, for a thousand ranges at once: squared distance of what is clipped, plus
   scale**2 / 12 for what is rounded, plus x**2 for what rounds to zero. From running sums.
2. the *squared error*, for the few best of them: the integral over every bin of the squared
   difference to the nearest quantized value, with the rounded zero point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backquant.observe.qparams import QuantRange, affine_qparams, is_symmetric

__all__ = ["best_range", "squared_error"]

_COARSE = 2.0 ** torch.linspace(0, -8, 65, dtype=torch.float64)
_FINE = 2.0 ** torch.linspace(-0.125, 0.125, 25, dtype=torch.float64)
_EXAMINED = 64  # ranges per round that get the exact error
_AT_ONCE = 1 << 20  # bins times ranges that are held in memory


def best_range(
    bins: tuple[Tensor, Tensor], count: Tensor, target: QuantRange, eps: Tensor
) -> tuple[Tensor, Tensor]:
    """The range (float32 ``[]`` each) whose qparams lose least on the histogram.

    Args: ``bins``: lower and upper edges (float64 ``[k]``), disjoint, in any order, at least one;
    ``count`` (int64 ``[k]``); ``eps`` the smallest scale. The outermost edges, as they are, are
    kept unless a narrower range has a smaller error.

    >>> edges = torch.arange(256, dtype=torch.float64)
    >>> target = QuantRange(torch.quint8, torch.per_tensor_affine, 0, 255)
    >>> best_range((edges, edges), torch.ones(256, dtype=torch.int64), target, torch.tensor([1e-7]))
    (tensor(0.), tensor(255.))
    """
    order = torch.argsort(bins[0])
    lower, upper, weight = bins[0][order], bins[1][order], count[order].to(torch.float64)
    sketch = _Sketch.of(lower, upper, weight, float(target.quant_max - target.quant_min))
    best = torch.stack((lower[0].clamp(max=0), upper[-1].clamp(min=0)))
    if is_symmetric(target.qscheme):
        best = best.abs().max() * best.new_tensor([-1.0, 1.0])
    grid = _symmetric_grid if is_symmetric(target.qscheme) else _affine_grid

    def error(ranges: Tensor) -> Tensor:
        scale, zero_point = affine_qparams(*ranges.to(torch.float32).unbind(1), target, eps)
        return squared_error((lower, upper), weight, scale, zero_point, target)

    for factors in (_COARSE, _FINE):
        best = _round(best, grid(best, factors.to(best.device)), sketch, error)
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


def _round(
    best: Tensor, ranges: Tensor, sketch: _Sketch, error: Callable[[Tensor], Tensor]
) -> Tensor:
    """The best of ``best`` ([2]) and ``ranges`` ([n, 2]); the former on a tie."""
    rough = sketch(ranges)
    examined = ranges[torch.topk(rough, min(_EXAMINED, len(rough)), largest=False).indices]
    examined = torch.cat((best[None], examined))
    return examined[torch.argmin(error(examined))]


def _affine_grid(best: Tensor, factors: Tensor) -> Tensor:
    """Every combination of both ends times a factor; an end at zero stays there."""
    low = best[:1] if best[0] == 0 else best[0] * factors
    high = best[1:] if best[1] == 0 else best[1] * factors
    return torch.cartesian_prod(low, high)


def _symmetric_grid(best: Tensor, factors: Tensor) -> Tensor:
    return factors[:, None] * best


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
        low, high = ranges.unbind(1)
        step = (high - low) / self.span
        total = self.sums[:, -1:]
        below, above = self._up_to(low), total - self._up_to(high)
        near_zero = self._up_to(step / 2) - self._up_to(-step / 2)
        rounded = total[0] - below[0] - above[0] - near_zero[0]
        clipped = _around(below, low) + _around(above, high)
        return clipped + rounded.clamp(min=0) * step**2 / 12 + near_zero[2]

    def _up_to(self, x: Tensor) -> Tensor:
        """The sums over values less than ``x`` ([n]): [3, n]."""
        place = torch.searchsorted(self.upper, x).clamp(max=len(self.upper) - 1)
        low, high = self.lower[place], self.upper[place]
        x = x.clamp(low, high)
        width = (high - low).clamp(min=torch.finfo(torch.float64).tiny)
        part = self.weight[place] * (x - low) / width
        within = torch.stack((part, part * (low + x) / 2, part * (low**2 + low * x + x**2) / 3))
        full = (x >= high)[None]
        return torch.where(full, self.sums[:, place + 1], self.sums[:, place] + within)


def _around(sums: Tensor, x: Tensor) -> Tensor:
    """Sum of (value - x)**2 from the sums of weight, value and value**2."""
    return (sums[2] - 2 * x * sums[1] + x**2 * sums[0]).clamp(min=0)
