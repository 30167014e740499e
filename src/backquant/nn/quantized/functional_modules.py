"""The borders of the quantized part of a model, and functions of two quantized tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from backquant.nn.quantized.scaled import Scaled, limited

_ops: Any = torch.ops.quantized


class Quantize(Scaled):
    """Floats to a quantized tensor.

    >>> Quantize(0.5, 0, torch.quint8)(torch.tensor([1.2])).int_repr()
    tensor([2], dtype=torch.uint8)
    """

    def __init__(
        self, scale: Any, zero_point: Any, dtype: torch.dtype, factory_kwargs: Any = None
    ) -> None:
        nn.Module.__init__(self)
        self.dtype = dtype
        self._scaled(scale, zero_point)
        self.to(**(factory_kwargs or {}))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """Of any shape."""
        return torch.quantize_per_tensor(x, self.scale, self.zero_point, self.dtype)

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> Quantize:  # noqa: ARG003
        """Of a ``QuantStub`` that was observed."""
        made = cls(1.0, 0, mod.activation_post_process.dtype)
        made._measured(mod)
        return made

    def _get_name(self) -> str:
        return "Quantize"

    def extra_repr(self) -> str:
        return f"{self._qparams_repr()}, dtype={self.dtype}"


class DeQuantize(nn.Module):
    """A quantized tensor to floats.

    >>> DeQuantize()(Quantize(0.5, 0, torch.quint8)(torch.tensor([1.2])))
    tensor([1.])
    """

    def forward(self, Xq: torch.Tensor) -> torch.Tensor:  # noqa: N803 - PyTorch's argument name
        """Of any shape."""
        return Xq.dequantize()

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> DeQuantize:  # noqa: ARG003
        """Of a ``DeQuantStub``."""
        return cls()


class QFunctional(Scaled):
    """The functions of ``FloatFunctional`` on quantized tensors. There is no forward."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self._scaled(1.0, 0)

    @classmethod
    def from_float(cls, mod: Any, use_precomputed_fake_quant: bool = False) -> QFunctional:  # noqa: ARG003
        """Of a ``FloatFunctional`` that was observed."""
        made = cls()
        made._measured(mod)
        return made

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ARG002
        """Not for use: call ``add``, ``mul``, ``cat``, …"""
        raise RuntimeError("QFunctional has no forward: call add, mul, cat, matmul, ...")

    def _within(self, result: torch.Tensor) -> torch.Tensor:
        return result if self.limits is None else limited(result, *self.limits)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The sum."""
        return self._within(_ops.add(x, y, self.scale, self.zero_point))

    def add_scalar(self, x: torch.Tensor, y: float) -> torch.Tensor:
        """The sum with a number, which moves the zero point."""
        out: torch.Tensor = _ops.add_scalar(x, y)
        return out

    def mul(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The product."""
        return self._within(_ops.mul(x, y, self.scale, self.zero_point))

    def mul_scalar(self, x: torch.Tensor, y: float) -> torch.Tensor:
        """The product with a number, which changes the scale."""
        out: torch.Tensor = _ops.mul_scalar(x, y)
        return out

    def cat(self, x: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """One after the other."""
        return self._within(_ops.cat(x, dim, self.scale, self.zero_point))

    def add_relu(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """``relu(x + y)``."""
        return self._within(_ops.add_relu(x, y, self.scale, self.zero_point))

    def matmul(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The product of matrices."""
        return self._within(_ops.matmul(x, y, self.scale, self.zero_point))

    def _get_name(self) -> str:
        return "QFunctional"
