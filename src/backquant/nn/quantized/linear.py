"""Linear layers on quantized tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from backquant.nn.quantized.scaled import Weighted


class Linear(Weighted):
    """``torch.ops.quantized.linear`` with the weight of a reference module."""

    in_features: int
    out_features: int

    def _prepack(self) -> Any:
        return torch.ops.quantized.linear_prepack(self.weight(), self.bias())

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Input ``(*, in_features)``, output ``(*, out_features)``, both quantized."""
        out: torch.Tensor = torch.ops.quantized.linear(x, self._packed, self.scale, self.zero_point)
        return out

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """The same in float."""
        return F.linear(x, self.weight().dequantize(), self.bias())

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, {self._qparams_repr()}"


class LinearReLU(Linear):
    """``Linear`` and ReLU in one."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Input ``(*, in_features)``, output ``(*, out_features)``, both quantized."""
        out: torch.Tensor = torch.ops.quantized.linear_relu(
            x, self._packed, self.scale, self.zero_point
        )
        return out

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """The same in float."""
        return super().real(x).relu()


class LinearLeakyReLU(Linear):
    """``Linear`` and LeakyReLU."""

    negative_slope: float

    def _of(self, module: Any) -> None:
        self.negative_slope = module[1].negative_slope

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Input ``(*, in_features)``, output ``(*, out_features)``, both quantized."""
        packed, scale, zero_point = self._packed, self.scale, self.zero_point
        return _finished(
            x, packed, scale, zero_point, lambda y: torch.where(y > 0, y, y * self.negative_slope)
        )

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """The same in float."""
        return F.leaky_relu(super().real(x), self.negative_slope)


class LinearTanh(Linear):
    """``Linear`` and tanh."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Input ``(*, in_features)``, output ``(*, out_features)``, both quantized."""
        return _finished(x, self._packed, self.scale, self.zero_point, torch.tanh)

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """The same in float."""
        return super().real(x).tanh()


def _finished(
    x: torch.Tensor, packed: Any, scale: float, zero_point: int, function: Any
) -> torch.Tensor:
    """The product in float, a function of it, one rounding: not every engine has them as one operator."""
    product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    y = product(x.dequantize(), x.q_scale(), x.q_zero_point(), packed)
    return torch.quantize_per_tensor(function(y), scale, zero_point, x.dtype)
