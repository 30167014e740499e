"""Linear layers that are quantized at each call, or hold float16 weights: what a call measures is computed by
generated code, the products are the kernel of a static linear layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.lower.kernels.linear_dynamic import DynamicLinear, activated
from backquant.runtime.compiled import operators

_LEAST_SCALE = 2.0**-126  # the scale where all values are 0


class DynamicProduct(nn.Module):
    """``DynamicLinear`` with int8 weights: exact sums of the integers, from which those of the zero point are
    taken afterwards, since it is known at the call alone."""

    weight: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, kernel: DynamicLinear) -> None:
        super().__init__()
        self.config = kernel.config
        rows = kernel.weight.shape[0]
        self.register_buffer("weight", kernel.weight)
        scale = kernel.weight_scale.float().reshape(-1).expand(rows).clone()
        self.register_buffer("scale", scale.reshape(-1, 1))
        self.register_buffer("shift", kernel.weight.sum(1, dtype=torch.int64).float() * scale)
        self.register_buffer("bias", kernel.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top = 127 if self.config.reduce_range else 255
        value = x.float()
        least, most = value.amin().clamp(max=0.0), value.amax().clamp(min=0.0)
        scale = ((most - least) / top).clamp(min=_LEAST_SCALE)
        zero_point = (-least / scale).round().clamp(0, top)
        integers = (value / scale + zero_point).round().clamp(0, top).to(torch.uint8)
        plain: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")
        sums = operators.linear(integers, 1.0, 0, self.weight, self.scale, None, *plain)
        made = (sums - zero_point * self.shift) * scale
        made = made if self.bias is None else made + self.bias
        return activated(self.config, made).to(x.dtype)


class HalfWeights(nn.Module):
    """``DynamicLinear`` with float16 weights: products in float32."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, kernel: DynamicLinear) -> None:
        super().__init__()
        self.config = kernel.config
        self.register_buffer("weight", kernel.weight)
        self.register_buffer("bias", kernel.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = F.linear(x.float(), self.weight.float(), self.bias)
        return activated(self.config, made).to(x.dtype)


def dynamic_linear(kernel: DynamicLinear) -> nn.Module | None:
    """What takes the place of ``kernel``; ``None`` for weights with zero points.

    >>> from backquant.lower.kernels.linear_dynamic import DynamicLinearConfig
    >>> one = torch.ones(1, 2, dtype=torch.int8)
    >>> tensors = {"weight": one, "weight_scale": torch.ones(1),
    ...            "weight_zero_point": torch.zeros(1, dtype=torch.int64)}
    >>> kernel = DynamicLinear(DynamicLinearConfig("fbgemm", torch.int8), tensors)
    >>> dynamic_linear(kernel)(torch.tensor([[0.0, 255.0]]))
    tensor([[255.]])
    """
    if kernel.config.weight_dtype == torch.float16:
        return HalfWeights(kernel)
    return None if bool(kernel.weight_zero_point.any()) else DynamicProduct(kernel)
