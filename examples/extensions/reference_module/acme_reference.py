"""A reference module: linear layers whose weight a chip holds transposed, in blocks of rows."""

import torch
from torch import Tensor, nn


class TransposedLinear(nn.Module):
    """Computes in float what the chip computes in integers."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        made = x @ (self.weight * self.scale)
        return made if self.bias is None else made + self.bias

    @classmethod
    def from_float(cls, module: nn.Linear, weight_qparams: dict) -> "TransposedLinear":
        """``weight_qparams``: qscheme, dtype, scale, zero_point, axis (per channel), quant_min, quant_max."""
        scale = weight_qparams["scale"].float()
        steps = (module.weight.detach() / scale.reshape(-1, 1)).round()
        weight = steps.clamp(-127, 127).to(torch.int8)
        bias = None if module.bias is None else module.bias.detach().clone()
        return cls(weight.t().contiguous(), scale.reshape(1, -1), bias)
