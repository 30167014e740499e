"""Interpolation and padding on integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from backquant.dtypes import Rounding
from backquant.lower.kernels.integer.pooling import divided
from backquant.lower.kernels.integer.result import IntegerKernel, Result, steps

_BITS = 11  # fraction bits of the weights of two neighbours


def padded(x: Tensor, pad: Sequence[int], pad_mode: str, fill: int) -> Tensor:
    """``F.pad`` of integers of any dtype.

    >>> padded(torch.tensor([[[1, 2]]], dtype=torch.int16), (1, 0), "reflect", 0)
    tensor([[[2, 1, 2]]], dtype=torch.int16)
    """
    if pad_mode == "constant":
        return F.pad(x.to(torch.int64), list(pad), pad_mode, fill).to(x.dtype)
    return F.pad(x.double(), list(pad), pad_mode).to(x.dtype)


def nearest(
    x: Tensor, size: Any, scale_factor: Any, resize_mode: str, exactly: bool | None
) -> Tensor:
    """``F.interpolate`` by the nearest neighbour; ``exactly``: ``recompute_scale_factor``.

    >>> nearest(torch.tensor([[[1, 2]]], dtype=torch.int16), None, 2.0, "nearest", None)
    tensor([[[1, 1, 2, 2]]], dtype=torch.int16)
    """
    made = F.interpolate(
        x.double(), size, scale_factor, resize_mode, recompute_scale_factor=exactly
    )
    return made.to(x.dtype)


@dataclass(frozen=True, kw_only=True)
class BilinearConfig(Result):
    """The arguments of ``F.interpolate``."""

    x_scale: float
    x_zero_point: int
    align_corners: bool
    recompute_scale_factor: bool
    scale_factor: tuple[float, ...] = ()
    operator: str = "bilinear"


class IntegerBilinear(IntegerKernel):
    """Bilinear interpolation with integer weights of 11 bits for each axis; ``size`` at each call, or None.

    >>> config = BilinearConfig(x_scale=1.0, x_zero_point=0, align_corners=True, out_scale=1.0,
    ...     recompute_scale_factor=False, out_zero_point=0, quant_min=0, quant_max=255,
    ...     integer_dtype=torch.uint8)
    >>> IntegerBilinear(config)(torch.tensor([[[[0, 8]]]], dtype=torch.uint8), [1, 3])
    tensor([[[[0, 4, 8]]]], dtype=torch.uint8)
    """

    config_class = BilinearConfig
    config: BilinearConfig
    kernel = "bilinear"

    def forward(self, x: Tensor, size: Any = None) -> Tensor:
        """Integers of the result."""
        config = self.config
        values = steps(x, config.x_zero_point)
        for place, axis in enumerate((-2, -1)):
            given = x.shape[axis]
            factor = (config.scale_factor * 2)[place] if size is None else None
            if factor is None:
                wanted = size if isinstance(size, int) else int(size[place])
            else:
                wanted = floor(given * factor)
            exact = None if config.recompute_scale_factor else factor
            values = _along(values, axis, wanted, config.align_corners, exact)
        if config.x_scale == config.out_scale:
            rounding = Rounding(config.rounding)
            return config.of_steps(divided(values, 1 << (2 * _BITS), rounding))
        unit = torch.tensor(config.x_scale * 2.0 ** (-2 * _BITS), dtype=torch.float64)
        return config.of_sums(values, unit)


def _along(x: Tensor, axis: int, wanted: int, aligned: bool, factor: float | None) -> Tensor:
    """Neighbours along one axis, weighted; the result has 11 bits more."""
    given = x.shape[axis]
    place = torch.arange(wanted, dtype=torch.float64)
    if aligned:
        source = place * ((given - 1) / (wanted - 1) if wanted > 1 else 0.0)
    else:
        source = ((place + 0.5) * (1 / factor if factor else given / wanted) - 0.5).clamp(min=0)
    first = source.floor().to(torch.int64).clamp(max=given - 1)
    second = (first + 1).clamp(max=given - 1)
    weight = torch.round((source - first) * (1 << _BITS)).to(torch.int64)
    shape = [-1, *[1] * (-1 - axis)]
    weight = weight.reshape(shape)
    return (
        x.index_select(axis, first) * ((1 << _BITS) - weight)
        + x.index_select(axis, second) * weight
    )
