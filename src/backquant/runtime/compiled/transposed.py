"""Transposed convolutions as convolutions: each of ``stride`` neighbours in the result is a channel, made of
the taps that reach it, and the channels are laid side by side. No product with an inserted zero is computed.

Position ``s·m + r`` of the result reads input ``m - q`` by tap ``k``, where ``d·k = s·q + r`` (stride ``s``,
dilation ``d``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from backquant.lower.kernels.quantized import QuantizedWeighted
from backquant.runtime.compiled import operators


class TransposedConvolution(nn.Module):
    """``QuantizedWeighted`` for a transposed convolution.

    >>> from backquant.lower.kernels.packed import WeightTensors
    >>> from backquant.lower.kernels.quantized import QuantizedConfig
    >>> config = QuantizedConfig("conv_transpose1d", "fbgemm", 1.0, 0, 1.0, 0, (2,), (0,), (1,), (0,))
    >>> weight = torch.tensor([[[1, 2, 3]]], dtype=torch.int8)
    >>> tensors = WeightTensors(weight, torch.ones(1), torch.zeros(1, dtype=torch.int64), None)
    >>> made = TransposedConvolution(QuantizedWeighted(config, tensors))
    >>> made(torch.tensor([[[1, 10]]], dtype=torch.uint8))
    tensor([[[ 1,  2, 13, 20, 30]]], dtype=torch.uint8)
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, kernel: QuantizedWeighted) -> None:
        super().__init__()
        self.config = c = kernel.config
        size = tuple(kernel.weight.shape[2:])
        geometry = zip(size, c.stride, c.dilation, c.padding, c.output_padding, strict=True)
        self._kernel_size = size
        self.taps = [_taps(*numbers) for numbers in geometry]
        weight = _by_output(kernel.weight, c.groups)
        copies = math.prod(c.stride)
        channels = weight.shape[0]
        self.register_buffer("weight", _spread(weight, self.taps, c.stride, c.dilation))
        scale = kernel.weight_scale.reshape(-1, 1).expand(channels, copies)
        self.register_buffer("scale", scale.reshape(-1, 1).clone())
        bias = kernel.bias
        spread = None if bias is None else bias.reshape(-1, 1).expand(channels, copies)
        self.register_buffer("bias", None if spread is None else spread.reshape(-1, 1).clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c = self.config
        ones, padding = [1] * len(c.stride), [count - 1 for count in self.taps]
        post_op = "relu" if c.operator.endswith("_relu") else "none"
        made = operators.convolution(
            *(x, c.x_scale, c.x_zero_point, self.weight, self.scale, self.bias),
            *(ones, padding, ones, c.groups, None, 1.0, 0),
            *(c.out_scale, c.out_zero_point, torch.uint8, post_op, [], ""),
        )
        return self._side_by_side(made, x.shape[2:])

    def _side_by_side(self, made: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
        """``[batch, channels · strides, ...]`` as ``[batch, channels, ...]`` of the size of the result."""
        c, dims = self.config, len(self.config.stride)
        blocks = made.reshape(made.shape[0], -1, *c.stride, *made.shape[2:])
        order = [axis for i in range(dims) for axis in (2 + dims + i, 2 + i)]
        whole = [n * s for n, s in zip(made.shape[2:], c.stride, strict=True)]
        result = blocks.permute(0, 1, *order).reshape(made.shape[0], blocks.shape[1], *whole)
        for axis, n in enumerate(size):
            kernel = self._kernel_size[axis]
            span = (n - 1) * c.stride[axis] + c.dilation[axis] * (kernel - 1) + 1
            length = span - 2 * c.padding[axis] + c.output_padding[axis]
            result = result.narrow(axis + 2, c.padding[axis], length)
        return result


def _taps(kernel: int, stride: int, dilation: int, padding: int, output_padding: int) -> int:
    """Over how many inputs the convolution reaches: those that a tap reads, and enough for the result."""
    last = dilation * (kernel - 1)
    beyond = last + 1 + output_padding - padding - stride * (1 + last // stride)
    return 1 + last // stride + max(0, math.ceil(beyond / stride))


def _by_output(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """``[in, out / groups, ...]`` as ``[out, in / groups, ...]``."""
    parts = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
    return parts.reshape(-1, *parts.shape[2:])


def _spread(
    weight: torch.Tensor, taps: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    """``[out, in / groups, ...]`` as ``[out · strides, in / groups, *taps]``, the last input first."""
    made = weight.new_zeros(weight.shape[0], *stride, weight.shape[1], *taps)
    for tap in itertools.product(*(range(n) for n in weight.shape[2:])):
        at = [divmod(k * d, s) for k, d, s in zip(tap, dilation, stride, strict=True)]
        left = [n - 1 - q for n, (q, _) in zip(taps, at, strict=True)]
        copy: tuple[Any, ...] = (slice(None), *(r for _, r in at), slice(None), *left)
        taken: tuple[Any, ...] = (slice(None), slice(None), *tap)
        made[copy] = weight[taken]
    return made.reshape(-1, weight.shape[1], *taps)
