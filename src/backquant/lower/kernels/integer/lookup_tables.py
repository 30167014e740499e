"""Functions of one value as lookup tables; requantization to other qparams."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backquant.lower.kernels.integer.result import IntegerKernel, Result, steps


def every_integer(dtype: torch.dtype) -> Tensor:
    """All integers of ``dtype`` (8 or 16 bits) in ascending order.

    >>> every_integer(torch.int8)[[0, 255]]
    tensor([-128,  127], dtype=torch.int8)
    """
    info = torch.iinfo(dtype)
    return torch.arange(info.min, info.max + 1, dtype=torch.int32).to(dtype)


def filled(dtype: torch.dtype, function: Callable[[Tensor], Tensor]) -> Tensor:
    """The lookup table of ``function``: for each integer of ``dtype`` the integer of its result, as int32.

    >>> filled(torch.uint8, lambda q: 255 - q.int())[[0, 255]]
    tensor([255,   0], dtype=torch.int32)
    """
    return function(every_integer(dtype)).to(torch.int32)


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    """``operator``: what the table holds, for people; ``low``: the integer of its first entry.

    ``channels``: how many tables there are, one for each channel (axis 1), in one row.
    """

    operator: str
    low: int
    integer_dtype: torch.dtype
    channels: int = 1


class IntegerTable(IntegerKernel):
    """Integers of any shape to the entries of ``table`` (int32).

    >>> config = TableConfig(operator="negative", low=-128, integer_dtype=torch.int8)
    >>> table = filled(torch.int8, lambda q: (-q.int()).clamp(max=127))
    >>> IntegerTable(config, table=table)(torch.tensor([-128, 5], dtype=torch.int8))
    tensor([127,  -5], dtype=torch.int8)
    """

    config_class = TableConfig
    config: TableConfig
    kernel = "table"
    tensor_names = ("table",)
    table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """The entry for each integer."""
        config = self.config
        index = steps(x, config.low)
        if config.channels > 1:
            size = self.table.numel() // config.channels
            first = torch.arange(config.channels) * size
            index = index + first.reshape(-1, *[1] * (x.dim() - 2))
        entries = self.table.index_select(0, index.reshape(-1)).reshape(index.shape)
        return entries.to(config.integer_dtype)

    @property
    def name(self) -> str:
        return f"integer.table({self.config.operator})"


def rescale(
    x: Tensor,
    scale: float,
    zero_point: int,
    out_scale: float,
    out_zero_point: int,
    quant_min: int,
    quant_max: int,
    integer_dtype: torch.dtype,
    requantization: str = "float",
    rounding: str = "half_even",
) -> Tensor:
    """Integers under one set of qparams to integers under another.

    >>> rescale(torch.tensor([10, 14], dtype=torch.uint8), 0.5, 10, 1.0, 0, 0, 255, torch.uint8)
    tensor([0, 2], dtype=torch.uint8)
    """
    result = Result(
        out_scale=out_scale,
        out_zero_point=out_zero_point,
        quant_min=quant_min,
        quant_max=quant_max,
        integer_dtype=integer_dtype,
        requantization=requantization,
        rounding=rounding,
    )
    return result.of_sums(steps(x, zero_point), torch.tensor(scale, dtype=torch.float64))
