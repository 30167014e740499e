"""Convolutions on plain integer tensors by oneDNN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from backquant.lower.kernels.packed import PackedKernel, WeightTensors
from backquant.lower.kernels.postop import PostOp, with_post_op
from backquant.lower.kernels.zero_point import fold_zero_point, pad_with, plan_padding
from backquant.lower.qdq import QParams, quantized_value

__all__ = ["ConvConfig", "OnednnConv"]


@dataclass(frozen=True)
class ConvConfig:
    """All numbers of one convolution. ``out_dtype`` float32 gives a float result (scale 1, zero
    point 0). The tuples have one entry per spatial dimension, at most three. ``rounds_once``: the
    reference model rounds before the post-op, too."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    x_scale: float
    x_zero_point: int
    out_scale: float
    out_zero_point: int
    out_dtype: torch.dtype
    post_op: str = "none"
    post_numbers: tuple[float, ...] = ()
    post_algorithm: str = ""
    rounds_once: bool = False


class OnednnConv(PackedKernel):
    """``onednn::qconv_pointwise``: 1d, 2d or 3d convolution, bias and one unary operator; a 1×1
    convolution by ``onednn::qlinear_pointwise``.

    Takes uint8 ``[batch, in, ...]`` of any batch and spatial size, in any memory format (channels
    last is the fast one), and returns ``[batch, out, ...]`` of ``config.out_dtype``, channels last.
    The weight is int8 ``[out, in / groups, ...]`` with zero points 0.

    >>> config = ConvConfig((1, 1), (0, 0), (1, 1), 1, 0.5, 10, 0.5, 0, torch.uint8, "relu")
    >>> one = torch.ones(1, 1, 1, 1, dtype=torch.int8)
    >>> tensors = WeightTensors(one, torch.ones(1), torch.zeros(1, dtype=torch.int64), None)
    >>> kernel = OnednnConv(config, tensors)
    >>> kernel(torch.tensor([[[[8, 14]]]], dtype=torch.uint8)).flatten()
    tensor([0, 4], dtype=torch.uint8)
    """

    config_class = ConvConfig
    kernel = "onednn.qconv_pointwise"
    config: ConvConfig

    def __init__(self, config: ConvConfig, tensors: WeightTensors) -> None:
        super().__init__(config, tensors)
        c = config
        depthwise = c.groups > 1 and tensors.weight.shape[1] == 1
        self._padding = plan_padding(c.padding, c.x_zero_point, depthwise)
        self._geometry = (list(c.stride), self._padding.inside, list(c.dilation), c.groups)
        ones = (1,) * len(c.stride)
        plain = c.stride == ones and not any(c.padding) and c.groups == 1
        self.is_linear = plain and tuple(tensors.weight.shape[2:]) == ones
        post_op = PostOp(c.post_op, c.post_numbers, c.post_algorithm)
        inside = self.is_linear or post_op.applied_by_conv(len(c.stride))
        self._clamp = None if inside else _bounds(post_op, c)
        self._out = (
            c.out_scale,
            c.out_zero_point,
            c.out_dtype,
            c.post_op if inside else "none",
            list(c.post_numbers) if inside else [],
            c.post_algorithm if inside else "",
        )

    @property
    def name(self) -> str:
        kernel = f"onednn.qconv{len(self.config.stride)}d_pointwise"
        return with_post_op(kernel, self.config.post_op, self.config.rounds_once)

    def _pack(self, size: tuple[int, ...]) -> Any:
        c, padding = self.config, self._padding
        bias = fold_zero_point(self.weight, self.weight_scale, self.bias, c.x_scale, padding.folded)
        if self.is_linear:
            return torch.ops.onednn.qlinear_prepack(self.weight.flatten(1).contiguous(), None), bias
        weight = torch.ops.onednn.qconv_prepack(
            self.weight,
            self.weight_scale,
            c.x_scale,
            padding.zero_point,
            *self._geometry,
            [1, self.weight.shape[1] * c.groups, *size],
        )
        return weight, bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """uint8 ``[batch, in, ...]`` to ``[batch, out, ...]``."""
        if self.is_linear:
            return self._linear(x)
        padding = self._padding
        if padding.before is not None:
            x = pad_with(x, padding.before, self.config.x_zero_point)
        weight, bias = self.packed_for(x.shape[2:])
        out: torch.Tensor = torch.ops.onednn.qconv_pointwise.default(
            x,
            self.config.x_scale,
            padding.zero_point,
            weight,
            self.weight_scale,
            self.weight_zero_point,
            bias,
            *self._geometry,
            *self._out,
        )
        return out if self._clamp is None else out.clamp_(*self._clamp)

    def _linear(self, x: torch.Tensor) -> torch.Tensor:
        """A 1×1 convolution as a linear layer over the channels, whose layout suits every size."""
        weight, bias = self.packed_for(())
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
            x.movedim(1, -1).contiguous(),
            self.config.x_scale,
            0,
            weight,
            self.weight_scale,
            self.weight_zero_point,
            bias,
            *self._out,
        )
        return out.movedim(-1, 1)


def _bounds(clamp: PostOp, config: ConvConfig) -> tuple[float, float]:
    """A clamp of the output as it leaves the kernel; rounding is monotone, so this is exact."""
    if config.out_dtype == torch.float32:
        return clamp.bounds
    full = QParams(config.out_scale, config.out_zero_point, 0, 255, config.out_dtype)
    low, high = (quantized_value(bound, full) for bound in clamp.bounds)
    return low, high
