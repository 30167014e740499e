"""Pooling on integers: maxima select, averages are exact sums divided once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from backquant.dtypes import Rounding
from backquant.lower.kernels.integer.result import IntegerKernel, Result, steps


def divided(x: Tensor, count: Tensor | int, rounding: Rounding) -> Tensor:
    """``x / count`` (``count`` above 0), rounded, all in int64.

    >>> [divided(torch.tensor([3, -3]), 2, rounding).tolist() for rounding in Rounding]
    [[2, -2], [2, -2], [2, -1], [1, -2]]
    """
    floor = torch.div(x, count, rounding_mode="floor")
    twice = 2 * (x - floor * count)
    if rounding is Rounding.DOWN:
        return floor
    tie = {
        Rounding.HALF_UP: torch.ones_like(x, dtype=torch.bool),
        Rounding.HALF_AWAY: x >= 0,
        Rounding.HALF_EVEN: floor % 2 == 1,
    }[rounding]
    return floor + ((twice > count) | ((twice == count) & tie)).to(torch.int64)


@dataclass(frozen=True)
class MaxPoolConfig:
    """The numbers of ``max_pool1d`` to ``max_pool3d``."""

    operator: str
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    ceil_mode: bool


class IntegerMaxPool(IntegerKernel):
    """The largest integer of each window, under any qparams.

    >>> kernel = IntegerMaxPool(MaxPoolConfig("max_pool1d", (2,), (2,), (0,), (1,), False))
    >>> kernel(torch.tensor([[1, 7, 3, 2]], dtype=torch.uint8))
    tensor([[7, 3]], dtype=torch.uint8)
    """

    config_class = MaxPoolConfig
    config: MaxPoolConfig
    kernel = "max_pool"

    def forward(self, x: Tensor) -> Tensor:
        """Integers of the dtype of ``x``."""
        config = self.config
        pool: Any = getattr(F, config.operator)
        sizes = (config.kernel_size, config.stride, config.padding, config.dilation)
        made: Tensor = pool(x.double(), *sizes, config.ceil_mode).to(x.dtype)
        return made


@dataclass(frozen=True, kw_only=True)
class AverageConfig(Result):
    """``operator``: avg_pool, adaptive_avg_pool (to ``output_size``) or mean (over ``dim``)."""

    operator: str
    x_scale: float
    x_zero_point: int
    kernel_size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: int | None = None
    output_size: tuple[int | None, ...] = ()
    dim: tuple[int, ...] = ()
    keepdim: bool = False


class IntegerAverage(IntegerKernel):
    """Averages of integers.

    Where the scale stays, the sum of the integers is divided by their number, rounded as described; else
    their steps are requantized, with the number as a part of the factor.

    >>> config = AverageConfig(operator="mean", x_scale=0.5, x_zero_point=0, dim=(1,), out_scale=0.5,
    ...     out_zero_point=0, quant_min=0, quant_max=255, integer_dtype=torch.uint8)
    >>> IntegerAverage(config)(torch.tensor([[1, 4]], dtype=torch.uint8))
    tensor([2], dtype=torch.uint8)
    """

    config_class = AverageConfig
    config: AverageConfig
    kernel = "average"

    def forward(self, x: Tensor) -> Tensor:
        """Integers of the result."""
        config = self.config
        sums, count = self._sums(steps(x, config.x_zero_point))
        if config.x_scale == config.out_scale:
            zero = config.out_zero_point
            rounded = divided(sums + zero * count, count, Rounding(config.rounding))
            return config.of_steps(rounded - zero)
        unit = config.x_scale / torch.as_tensor(count, dtype=torch.float64)
        return config.of_sums(sums, unit)

    def _sums(self, x: Tensor) -> tuple[Tensor, Tensor | int]:
        config = self.config
        if config.operator == "mean":
            count = prod(x.shape[dim] for dim in config.dim)
            return x.sum(config.dim, keepdim=config.keepdim), count
        if config.operator == "adaptive_avg_pool":
            return _adaptive(x, config.output_size)
        return _windows(x, config)


def _adaptive(x: Tensor, sizes: Sequence[int | None]) -> tuple[Tensor, Tensor]:
    """Sums and numbers of the windows of adaptive pooling, one axis after the other."""
    count = torch.ones((), dtype=torch.int64)
    for place, wanted in enumerate(sizes):
        axis = place - len(sizes)
        size = x.shape[axis]
        out = size if wanted is None else wanted
        index = torch.arange(out)
        first, last = index * size // out, -(-(index + 1) * size // out)
        total = F.pad(x.movedim(axis, -1).cumsum(-1), (1, 0))
        x = (total[..., last] - total[..., first]).movedim(-1, axis)
        count = count * (last - first).reshape(-1, *[1] * (-1 - axis))
    return x, count


def _windows(x: Tensor, config: AverageConfig) -> tuple[Tensor, Tensor]:
    """Sums of windows, and by what ``avg_pool`` divides each."""
    dims = len(config.kernel_size)
    image = x.double()
    sizes = [config.kernel_size, config.stride, config.padding]
    if dims == 1:  # avg_pool1d takes no divisor, avg_pool2d does
        image = image.unsqueeze(-2)
        sizes = [(first, *numbers) for first, numbers in zip((1, 1, 0), sizes, strict=True)]
    pool: Any = F.avg_pool3d if dims == 3 else F.avg_pool2d
    tail = (config.ceil_mode, config.count_include_pad)
    sums = pool(image, *sizes, *tail, 1)
    ones = torch.ones_like(image[:1] if image.dim() > dims + 1 else image)
    inside, share = pool(ones, *sizes, *tail, 1), pool(ones, *sizes, *tail, config.divisor_override)
    count = torch.round(inside / share)
    if dims == 1:
        sums, count = sums.squeeze(-2), count.squeeze(-2)
    return sums.to(torch.int64), count.to(torch.int64)
