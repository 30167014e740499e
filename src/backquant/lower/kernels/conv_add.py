"""A convolution that is added to another tensor before it rounds: one oneDNN kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from backquant.lower.kernels.boundary import quantize
from backquant.lower.kernels.geometry import output_size
from backquant.lower.kernels.onednn_conv import OnednnConvolution
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.kernels.planned import Planned
from backquant.lower.kernels.views import as_quantized
from backquant.lower.kernels.zero_point import (
    has_short_sums,
    pad_with,
    plan_padding,
    rounds_within,
)
from backquant.native.plan import Result, Shape


@dataclass(frozen=True)
class ConvAddConfig:
    """All numbers of one convolution with addition. ``other``: the tensor that is added.
    ``overwrite``: its memory may be used for the result (nothing reads it afterwards).
    ``rounds_once``: the reference model rounds the convolution by itself first."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    x_scale: float
    x_zero_point: int
    other_scale: float
    other_zero_point: int
    out_scale: float
    out_zero_point: int
    relu: bool = False
    overwrite: bool = False
    rounds_once: bool = False


class OnednnConvAdd(OnednnConvolution):
    """``onednn::qconv2d_pointwise.binary``: 2d convolution, bias, addition, and ReLU or nothing.

    Takes uint8 ``[batch, in, height, width]`` and uint8 of the convolution's shape (or one that
    broadcasts with it), and returns uint8, channels last. The kernel accumulates into its second
    argument, which is copied unless ``overwrite`` is set.

    >>> config = ConvAddConfig((1, 1), (0, 0), (1, 1), 1, 0.5, 10, 1.0, 0, 0.5, 0)
    >>> one = torch.ones(1, 1, 1, 1, dtype=torch.int8)
    >>> tensors = WeightTensors(one, torch.ones(1), torch.zeros(1, dtype=torch.int64), None)
    >>> x, y = torch.full((1, 1, 1, 1), 14, dtype=torch.uint8), torch.ones(1, 1, 1, 1).byte()
    >>> OnednnConvAdd(config, tensors)(x, y).item()  # (14 - 10) * 0.5 + 1 = 3.0
    6
    """

    config_class = ConvAddConfig
    kernel = "onednn.qconv2d_pointwise.binary"
    config: ConvAddConfig

    def __init__(self, config: ConvAddConfig, tensors: WeightTensors) -> None:
        super().__init__(config, tensors)
        c = config
        summed = any(c.padding) and has_short_sums(tensors.weight, c.groups)
        is_precise = rounds_within(
            self.weight, self.weight_scale, c.x_scale, c.x_zero_point, c.out_scale
        )
        self._padding = plan_padding(c.padding, c.x_zero_point, summed or not is_precise)
        self._geometry = (list(c.stride), self._padding.inside, list(c.dilation), c.groups)
        self._out = (c.out_scale, c.out_zero_point, torch.uint8)
        self._other = (c.other_scale, c.other_zero_point, "sum", 1.0)
        relu = "relu" if c.relu else "none"
        self._planned = Planned(
            2,
            Shape(tuple(tensors.weight.shape), c.stride, c.padding, c.dilation, c.groups),
            (c.x_scale, c.x_zero_point),
            Result(c.out_scale, c.out_zero_point, torch.uint8, relu, (), ""),
            (c.other_scale, c.other_zero_point),
        )
        self._planned.is_precise = is_precise
        self._unary: tuple[Any, ...] = (relu, [], "")

    @property
    def name(self) -> str:
        fused = "add, relu" if self.config.relu else "add"
        kernel = self._planned.named(self.kernel)
        return f"{kernel}({fused}{', rounds once' if self.config.rounds_once else ''})"

    def _shape(self, x: torch.Tensor) -> list[int]:
        """The shape of the convolution of ``x``."""
        return [x.shape[0], self.weight.shape[0], *output_size(x.shape[2:], self._window)]

    def _is_planned(self, x: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether the library of kernels computes it."""
        takes = self._planned.takes(x) and self._planned.takes(other)
        return takes and list(other.shape) == self._shape(x)

    def _accumulator(self, other: torch.Tensor, shape: list[int]) -> torch.Tensor:
        """A tensor of the result's shape, channels last, that the kernel may write."""
        if list(other.shape) != shape:
            other = other.expand(shape)
        fresh = other.contiguous(memory_format=torch.channels_last)
        if fresh is not other or self.config.overwrite:
            return fresh
        return other.clone(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """uint8 ``[batch, in, height, width]`` and what is added to its convolution."""
        self.check_input(x)
        if x.dim() == 3:
            # without a batch; the result has one where `other` has
            found = self.forward(x.unsqueeze(0), other)
            return found if other.dim() > 3 else found.squeeze(0)
        if self._is_planned(x, other):
            return self._planned.convolution_add(self, x, other)
        instead = self._instead(x)
        if instead is not None:
            return instead[0].forward(instead[1], other)
        shape = self._shape(x)
        spreads = list(other.shape) != shape and self._spreads(other, shape)
        padding = self._padding
        if padding.before is not None:
            x = pad_with(x, padding.before, self.config.x_zero_point)
        weight, bias = self.packed_for(x.shape[2:])
        inputs = (
            x,
            self.config.x_scale,
            padding.zero_point,
            weight,
            self.weight_scale,
            self.weight_zero_point,
        )
        if spreads:
            return self._spread(inputs, bias, other)
        out: torch.Tensor = torch.ops.onednn.qconv2d_pointwise.binary(
            *inputs,
            self._accumulator(other, shape),
            bias,
            *self._geometry,
            *self._out,
            *self._other,
            *self._unary,
        )
        return out

    @staticmethod
    def _spreads(other: torch.Tensor, shape: list[int]) -> bool:
        """Whether broadcasting makes the sum larger than the convolution, which the kernel does not
        support."""
        return list(torch.broadcast_shapes(other.shape, shape)) != shape

    def _spread(
        self, inputs: tuple[Any, ...], bias: torch.Tensor | None, other: torch.Tensor
    ) -> torch.Tensor:
        """The sum of a float convolution and a larger tensor."""
        c = self.config
        plain: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")
        conv = torch.ops.onednn.qconv_pointwise.default(*inputs, bias, *self._geometry, *plain)
        added = conv + as_quantized(other, c.other_scale, c.other_zero_point).dequantize()
        value = added.relu_() if c.relu else added
        return quantize(value, c.out_scale, c.out_zero_point, 0, 255, torch.uint8)
