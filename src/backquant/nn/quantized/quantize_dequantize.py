"""One quantize and one dequantize, per tensor, as a module."""

from __future__ import annotations

import torch
from torch import nn

from backquant.dtypes import (
    TensorQParams,
    dequantize_tensor,
    is_scaled_float,
    quantize_bounds,
    quantize_tensor,
    storage_dtype,
)
from backquant.graph.dialect_ops import register_quantized_decomposed
from backquant.observe.protocol import is_placeholder, qparam_dict


class QuantizeDequantize(nn.Module):
    """Floats of any shape, rounded to what values of ``dtype`` can stand for.

    Buffers ``scale`` (float32) and ``zero_point`` (int64), both without dimension.

    >>> QuantizeDequantize(0.5, 0, torch.qint8, -128, 127)(torch.tensor([0.6, 100.0]))
    tensor([ 0.5000, 63.5000])
    """

    scale: torch.Tensor
    zero_point: torch.Tensor

    def __init__(
        self, scale: float, zero_point: int, dtype: torch.dtype, quant_min: int, quant_max: int
    ) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale, dtype=torch.float32))
        self.register_buffer("zero_point", torch.tensor(zero_point, dtype=torch.int64))
        self.dtype, self.quant_min, self.quant_max = dtype, quant_min, quant_max

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape, float32."""
        if is_scaled_float(self.dtype):
            ends = self.quant_min, self.quant_max
            qparams = TensorQParams(self.scale, self.zero_point, *ends, self.dtype)
            return dequantize_tensor(quantize_tensor(x, qparams), self.scale, self.zero_point)
        register_quantized_decomposed()
        ops, bounds = torch.ops.quantized_decomposed, (self.quant_min, self.quant_max)
        arguments = (self.scale, self.zero_point, *bounds, storage_dtype(self.dtype))
        quantized = ops.quantize_per_tensor.tensor(x, *arguments)
        result: torch.Tensor = ops.dequantize_per_tensor.tensor(quantized, *arguments)
        return result

    @property
    def numbers(self) -> tuple[float, int, torch.dtype]:
        """Scale, zero point and dtype of PyTorch's quantized tensors."""
        return float(self.scale), int(self.zero_point), self.dtype

    def extra_repr(self) -> str:
        """Scale, zero point and dtype."""
        return f"scale={self.scale:.6g}, zero_point={self.zero_point}, dtype={self.dtype}"

    @classmethod
    def from_observer(cls, observer: nn.Module) -> nn.Module | None:
        """From the qparams of an observer or fake quantize; ``None`` for one that measures nothing.

        >>> from backquant.observe import MinMaxObserver, NoopObserver
        >>> observer = MinMaxObserver()
        >>> _ = observer(torch.tensor([0.0, 2.55]))
        >>> QuantizeDequantize.from_observer(observer)
        QuantizeDequantize(scale=0.01, zero_point=0, dtype=torch.quint8)
        >>> QuantizeDequantize.from_observer(NoopObserver()) is None
        True
        """
        if not hasattr(observer, "calculate_qparams") or is_placeholder(observer):
            return None
        qparams = qparam_dict(observer)
        if qparams["qscheme"] is None:
            return None
        low, high = quantize_bounds(qparams["dtype"])
        return cls(
            float(qparams["scale"]),
            int(qparams["zero_point"]),
            qparams["dtype"],
            qparams.get("quant_min", low),
            qparams.get("quant_max", high),
        ).to(qparams["scale"].device)
