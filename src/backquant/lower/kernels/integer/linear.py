"""Layers of the integer reference with several scales in one sum: linear ones with weights in groups, and
linear ones, convolutions and products of matrices whose inputs are quantized at each call.

Sums of one group are exact integers. What they stand for are float64: they are added in the order of the
groups, after them the bias, and rounded once, to integers of the result or to float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from backquant.dtypes import Rounding, block_of, round_to
from backquant.lower.kernels.integer.result import IntegerKernel, Result, steps
from backquant.lower.kernels.integer.weighted import convolution

_FAR = 2.0**40


def summed(integers: Tensor, weight: Tensor, zero_point: Tensor, scale: Tensor) -> Tensor:
    """``integers`` (int64, ``[…, in]``) times a weight ``[out, in]``, in float64, in units of their scale.

    The weight has one scale, one for each output, or a grid of them.

    >>> grid = torch.tensor([[0.5, 2.0]], dtype=torch.float64)
    >>> zeros = torch.zeros(1, 2, dtype=torch.int64)
    >>> summed(torch.tensor([[1, 2, 3, 4]]), torch.ones(1, 4, dtype=torch.int8), zeros, grid).item()
    15.5
    """
    block = block_of(weight.shape, scale.shape)
    rows, size = (1, weight.shape[1]) if block is None else (block[0], block[1])
    grid = scale.reshape(-1, 1) if block is None else scale.repeat_interleave(rows, 0)
    zeros = zero_point.reshape(-1, 1) if block is None else zero_point.repeat_interleave(rows, 0)
    total = torch.zeros((), dtype=torch.float64)
    for number in range(weight.shape[1] // size):
        at = slice(number * size, (number + 1) * size)
        taken = weight[:, at].to(torch.int64) - zeros[:, number : number + 1]
        sums = torch.matmul(integers[..., at].double(), taken.double().t())
        total = total + sums * grid[:, number]
    return total


@dataclass(frozen=True, kw_only=True)
class InGroupsConfig(Result):
    """A static integer input. ``is_float``: what comes out is float32, with none below 0 where
    ``is_rectified``."""

    x_scale: float
    x_zero_point: int
    operator: str = "linear"
    is_float: bool = False
    is_rectified: bool = False


class IntegerInGroups(IntegerKernel):
    """``weight``: integers ``[out, in]``; ``scale`` (float64) and ``zero_point`` (int64): a grid each.

    ``bias``: float32, or none.

    >>> config = InGroupsConfig(x_scale=1.0, x_zero_point=0, out_scale=0.5, out_zero_point=0, quant_min=-128,
    ...                         quant_max=127, integer_dtype=torch.int8)
    >>> kernel = IntegerInGroups(config, weight=torch.ones(1, 4, dtype=torch.int8),
    ...     scale=torch.tensor([[0.5, 2.0]], dtype=torch.float64),
    ...     zero_point=torch.zeros(1, 2, dtype=torch.int64))
    >>> kernel(torch.tensor([[1, 2, 3, 4]], dtype=torch.int8)).item()  # (3 * 0.5 + 7 * 2) / 0.5
    31
    """

    config_class: ClassVar[type] = InGroupsConfig
    config: InGroupsConfig
    kernel = "linear_in_groups"
    tensor_names = ("weight", "zero_point", "scale", "bias")
    weight: Tensor
    zero_point: Tensor
    scale: Tensor
    bias: Tensor | None

    @property
    def name(self) -> str:
        return f"integer.{self.kernel}"

    def forward(self, x: Tensor) -> Tensor:
        """Integers of the result; float32 where the configuration says so."""
        config = self.config
        total = summed(steps(x, config.x_zero_point), self.weight, self.zero_point, self.scale)
        total = total * config.x_scale
        total = total if self.bias is None else total + self.bias.double()
        if config.is_float:
            return (total.clamp(min=0) if config.is_rectified else total).float()
        whole = round_to(total / config.out_scale, Rounding(config.rounding))
        return config.of_steps(whole.clamp(-_FAR, _FAR).to(torch.int64))


@dataclass(frozen=True, kw_only=True)
class AtEachCallConfig:
    """The integers that an input becomes: of ``integer_dtype``, in this range, with a scale of at least
    ``eps``; around 0 where ``is_symmetric``, one scale for each row where ``is_by_token``."""

    integer_dtype: torch.dtype
    quant_min: int
    quant_max: int
    eps: float
    operator: str = "linear"
    is_symmetric: bool = False
    is_by_token: bool = False
    is_rectified: bool = False


class IntegerAtEachCall(IntegerKernel):
    """A float input, made integers as ``quantized_decomposed.choose_qparams`` has it, and float32 out.

    Tensors as those of ``IntegerInGroups``; the scale of the weight may be one, or one for each output.
    """

    config_class: ClassVar[type] = AtEachCallConfig
    config: AtEachCallConfig
    kernel = "linear_at_each_call"
    tensor_names: ClassVar[tuple[str, ...]] = ("weight", "zero_point", "scale", "bias")
    weight: Tensor
    zero_point: Tensor
    scale: Tensor
    bias: Tensor | None

    @property
    def name(self) -> str:
        return f"integer.{self.kernel}"

    def forward(self, x: Tensor) -> Tensor:
        """float32, none below 0 where the configuration says so."""
        integers, scale = self.quantized(x, by_token=self.config.is_by_token)
        total = summed(integers, self.weight, self.zero_point, self.scale) * scale
        total = total if self.bias is None else total + self.bias.double()
        return (total.clamp(min=0) if self.config.is_rectified else total).float()

    def quantized(self, x: Tensor, *, by_token: bool) -> tuple[Tensor, Tensor]:
        """Whole numbers of steps around the zero point (int64), and the step (float64)."""
        config, ops = self.config, torch.ops.quantized_decomposed
        ends = (config.quant_min, config.quant_max, config.integer_dtype)
        if by_token:
            scale, zero = ops.choose_qparams_per_token_asymmetric(x, config.integer_dtype)
            integers = ops.quantize_per_token(x, scale, zero, *ends)
        else:
            name = "choose_qparams_symmetric" if config.is_symmetric else "choose_qparams"
            chosen: Any = getattr(ops, name).tensor
            scale, zero = chosen(x, *ends[:2], config.eps, config.integer_dtype)
            integers = ops.quantize_per_tensor.tensor(x, scale, zero, *ends)
        return integers.to(torch.int64) - zero.to(torch.int64), scale.double()


@dataclass(frozen=True, kw_only=True)
class ConvAtEachCallConfig(AtEachCallConfig):
    """The same of a convolution: ``operator`` is conv1d … conv3d, conv_transpose1d … conv_transpose3d."""

    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    output_padding: tuple[int, ...] = ()
    groups: int = 1


class IntegerConvAtEachCall(IntegerAtEachCall):
    """A float input ``[batch, in, …]``, made integers with one scale, and float32 out.

    ``weight``: integers as the operator takes them; ``zero_point``: int64, broadcasts over them; ``scale``:
    float64, one for each output channel, or one for all.
    """

    config_class = ConvAtEachCallConfig
    config: ConvAtEachCallConfig
    kernel = "conv_at_each_call"

    @property
    def name(self) -> str:
        return f"integer.{self.config.operator}_at_each_call"

    def forward(self, x: Tensor) -> Tensor:
        """float32, none below 0 where the configuration says so."""
        integers, step = self.quantized(x, by_token=False)
        weight = (self.weight.to(torch.int64) - self.zero_point).double()
        by_channel = (-1, *[1] * len(self.config.stride))
        sums = convolution(self.config, integers.double(), weight)
        total = sums * self.scale.reshape(by_channel) * step
        total = total if self.bias is None else total + self.bias.double().reshape(by_channel)
        return (total.clamp(min=0) if self.config.is_rectified else total).float()


class IntegerProductAtEachCall(IntegerAtEachCall):
    """Two float inputs, made integers, the first with a scale for each row where the configuration says so,
    and float32 out."""

    kernel = "matmul_at_each_call"
    tensor_names = ()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        """The product of ``[…, m, k]`` and ``[…, k, n]``."""
        one, scale = self.quantized(x, by_token=self.config.is_by_token)
        two, other = self.quantized(y, by_token=False)
        return (torch.matmul(one.double(), two.double()) * scale * other).float()
