"""Convolutions and linear layers by torch's ``quantized::`` kernels: fbgemm, qnnpack, and transposed
convolutions everywhere.

Their packed weights belong to one of torch's quantized engines (``engine_setting``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from backquant.lower.kernels.engine_setting import packing_for
from backquant.lower.kernels.packed import PackedKernel, WeightTensors
from backquant.lower.kernels.views import as_quantized, integer_view, quantized_weight
from backquant.lower.kernels.zero_point import pad_with


@dataclass(frozen=True)
class QuantizedConfig:
    """``operator``: ``linear``, ``conv2d``, ``conv_transpose2d``, … with ``_relu`` for a ReLU behind.
    ``engine``: a quantized engine of torch. The tuples are empty for ``linear``; ``output_padding`` is
    for transposed convolutions. ``pads_before``: the input is padded before the kernel, not by it: FBGEMM's
    depthwise kernel, whose sums of 16 bits saturate, is taken only where it pads by half of the kernel."""

    operator: str
    engine: str
    x_scale: float
    x_zero_point: int
    out_scale: float
    out_zero_point: int
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    output_padding: tuple[int, ...] = ()
    groups: int = 1
    pads_before: bool = False


class QuantizedWeighted(PackedKernel):
    """``quantized::linear``, ``quantized::conv{1,2,3}d``, ``quantized::conv_transpose{1,2,3}d``.

    Takes uint8 integers and returns uint8 integers. The weight is int8; its scale has no dimension,
    or (not for transposed convolutions) one entry per output channel.

    >>> config = QuantizedConfig("linear", "fbgemm", 0.5, 10, 1.0, 0)
    >>> one = torch.ones(1, 2, dtype=torch.int8)
    >>> tensors = WeightTensors(one, torch.ones(1), torch.zeros(1, dtype=torch.int64), None)
    >>> QuantizedWeighted(config, tensors)(torch.tensor([[12, 14]], dtype=torch.uint8))
    tensor([[3]], dtype=torch.uint8)
    """

    config_class = QuantizedConfig
    kernel = "quantized"
    config: QuantizedConfig

    def __init__(self, config: QuantizedConfig, tensors: WeightTensors) -> None:
        super().__init__(config, tensors)

    @property
    def name(self) -> str:
        return f"quantized.{self.config.operator}({self.config.engine})"

    def _pack(self, size: tuple[int, ...]) -> Any:  # noqa: ARG002 - one layout suits all sizes
        c = self.config
        ops = torch.ops.quantized
        plain = c.operator.removesuffix("_relu")
        weight = quantized_weight(self.weight, self.weight_scale, self.weight_zero_point)
        with packing_for(c.engine):
            if plain == "linear":
                return ops.linear_prepack(weight, self.bias)
            lists = [list(c.stride), [0] * len(c.padding) if c.pads_before else list(c.padding)]
            if plain.startswith("conv_transpose"):
                lists.append(list(c.output_padding))
            prepack = getattr(ops, f"{plain}_prepack")
            return prepack(weight, self.bias, *lists, list(c.dilation), c.groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """uint8 integers to uint8 integers, by the rules of the operator."""
        self.check_input(x)
        c = self.config
        if x.dim() == (len(c.stride) + 1 if c.stride else 1):  # without a batch
            return self.forward(x.unsqueeze(0)).squeeze(0)
        if c.pads_before:
            x = pad_with(x, c.padding, c.x_zero_point)
        packed = self.packed_for(())
        q = as_quantized(x, c.x_scale, c.x_zero_point)
        kernel = getattr(torch.ops.quantized, c.operator)
        return integer_view(kernel(q, packed, c.out_scale, c.out_zero_point))
