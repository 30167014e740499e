"""Convolutions and linear layers on integers: exact sums, an integer bias, the described requantization.

An activation function behind them that is computed in one go is

1. a clamp: the range of the result is narrower;
2. a leaky ReLU: sums below 0 have a unit of their own;
3. any other: sums become 16-bit integers in steps of ``middle_scale``, for which there is a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from backquant.dtypes import Requantization, Rounding, requantize_sums
from backquant.lower.kernels.integer.result import IntegerKernel, Result, Term, steps

_LOW, _HIGH = -(1 << 15), (1 << 15) - 1


@dataclass(frozen=True, kw_only=True)
class WeightedConfig(Result):
    """``operator``: linear, conv1d … conv3d, conv_transpose1d … conv_transpose3d.

    ``accumulator_bits``: of the sums.
    ``is_float``: sums times their unit come out, as float32, none below 0 where ``rectified``.
    """

    operator: str
    x_zero_point: int
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    output_padding: tuple[int, ...] = ()
    groups: int = 1
    accumulator_bits: int = 32
    negative_slope: float = 1.0
    middle_scale: float = 1.0
    is_float: bool = False
    rectified: bool = False


class IntegerWeighted(IntegerKernel):
    """Integers ``[…, in]`` or ``[batch, in, …]`` times an integer weight.

    ``weight``: integers as the operator takes them; ``weight_zero_point``: int64, broadcasts over them;
    ``unit``: float64, what one step of the sums of each output channel stands for, or one for all;
    ``bias``: int64 ``[out]`` in these steps, or none; ``table``: activation 3, else none.

    >>> config = WeightedConfig(operator="linear", x_zero_point=2, out_scale=1.0, out_zero_point=0,
    ...                         quant_min=-128, quant_max=127, integer_dtype=torch.int8)
    >>> kernel = IntegerWeighted(config, weight=torch.tensor([[3, -1]], dtype=torch.int8),
    ...     weight_zero_point=torch.zeros(1, dtype=torch.int64), bias=torch.tensor([10]),
    ...     unit=torch.tensor([0.5], dtype=torch.float64))
    >>> kernel(torch.tensor([[4, 2]], dtype=torch.int8)).item()  # (3 * 2 + 10) * 0.5
    8
    """

    config_class: ClassVar[type] = WeightedConfig
    config: WeightedConfig
    kernel = "weighted"
    tensor_names = ("weight", "weight_zero_point", "bias", "unit", "table")
    weight: Tensor
    weight_zero_point: Tensor
    bias: Tensor | None
    unit: Tensor
    table: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Integers of the result; float32 where the configuration says so."""
        sums = self.sums(x)
        unit = self._by_channel(self.unit)
        if self.config.is_float:
            kept = sums.clamp(min=0) if self.config.rectified else sums
            return (kept.double() * unit).float()
        if self.table is not None:
            return self._looked_up(sums, unit)
        if self.config.negative_slope != 1.0:
            below = self.config.of_sums(sums, unit * self.config.negative_slope)
            return torch.where(sums < 0, below, self.config.of_sums(sums, unit))
        return self.config.of_sums(sums, unit)

    def sums(self, x: Tensor) -> Tensor:
        """Exact sums with the bias, int64, saturated to the bits of the accumulator."""
        config = self.config
        wide = steps(x, config.x_zero_point).double()
        weight = (self.weight.to(torch.int64) - self.weight_zero_point).double()
        if config.operator == "linear":
            sums = torch.matmul(wide, weight.t())
        else:
            sums = convolution(config, wide, weight)
        whole = sums.to(torch.int64)
        if self.bias is not None:
            whole = whole + self._by_channel(self.bias)
        return whole.clamp(
            -(1 << (config.accumulator_bits - 1)), (1 << (config.accumulator_bits - 1)) - 1
        )

    def _by_channel(self, values: Tensor) -> Tensor:
        """``[out]`` in the shape that broadcasts over results."""
        return values.reshape(-1, *[1] * len(self.config.stride))

    def _looked_up(self, sums: Tensor, unit: Tensor) -> Tensor:
        config, table = self.config, self.table
        assert table is not None
        arithmetic, rounding = Requantization(config.requantization), Rounding(config.rounding)
        middle = requantize_sums(sums, unit / config.middle_scale, arithmetic, rounding)
        index = middle.clamp(_LOW, _HIGH) - _LOW
        return (
            table.index_select(0, index.reshape(-1)).reshape(index.shape).to(config.integer_dtype)
        )


def convolution(config: Any, x: Tensor, weight: Tensor) -> Tensor:
    """The convolution whose name and geometry ``config`` has, without a bias.

    >>> config = WeightedConfig(operator="conv1d", x_zero_point=0, stride=(1,), padding=(0,), dilation=(1,),
    ...     out_scale=1.0, out_zero_point=0, quant_min=0, quant_max=1, integer_dtype=torch.int8)
    >>> convolution(config, torch.ones(1, 1, 3), torch.ones(1, 1, 2)).tolist()
    [[[2.0, 2.0]]]
    """
    function: Callable[..., Tensor] = getattr(F, config.operator)
    if config.operator.startswith("conv_transpose"):
        geometry = (config.stride, config.padding, config.output_padding, config.groups)
        return function(x, weight, None, *geometry, config.dilation)
    return function(x, weight, None, config.stride, config.padding, config.dilation, config.groups)


@dataclass(frozen=True, kw_only=True)
class ConvAddConfig(WeightedConfig):
    """A convolution to which another tensor is added; ``headroom``: see ``Term``."""

    other_scale: float
    other_zero_point: int
    headroom: int


class IntegerConvAdd(IntegerWeighted):
    """The sums of a convolution and other integers, added before they are rounded."""

    config_class = ConvAddConfig
    config: ConvAddConfig

    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        """Integers of the result."""
        config = self.config
        scale = torch.tensor(config.other_scale / config.out_scale, dtype=torch.float64)
        conv = Term(self.sums(x), self._by_channel(self.unit) / config.out_scale)
        return config.of_terms(
            [conv, Term(steps(other, config.other_zero_point), scale, config.headroom)]
        )

    @property
    def name(self) -> str:
        return f"integer.{self.config.operator}_add"
