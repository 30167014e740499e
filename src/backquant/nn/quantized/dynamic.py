"""Linear layers that quantize their input at each call: floats in, floats out."""

from __future__ import annotations

from typing import Any

import torch

from backquant.nn.quantized import linear as static

__all__ = ["Linear", "LinearReLU"]


class Linear(static.Linear):
    """``torch.ops.quantized.linear_dynamic`` with the weight of a reference module.

    ``reduce_range``: the input has one bit less, where products of eight bits would saturate.
    """

    reduce_range: bool = True

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Input ``(*, in_features)``, output ``(*, out_features)``, both float."""
        return self._by(torch.ops.quantized.linear_dynamic, x)

    def _by(self, operator: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = operator(x, self._packed, self.reduce_range)
        return out

    def _get_name(self) -> str:
        return f"DynamicQuantized{type(self).__name__}"

    def _qparams_repr(self) -> str:
        return f"dtype={self.weight().dtype}, {super()._qparams_repr().rpartition(', ')[2]}"


class LinearReLU(Linear):
    """``Linear`` and ReLU in one."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Input ``(*, in_features)``, output ``(*, out_features)``, both float."""
        return self._by(torch.ops.quantized.linear_relu_dynamic, x)
