"""Quantization to 8-bit floats: ``torch.ops.backquant.quantize_float8`` and ``dequantize_float8``.

    q = float8(clamp(x / scale, -max, max))      rounded to the nearest, ties to even; max is 448 for E4M3
    x = float(q) * scale

The operators of ``quantized_decomposed`` round to whole numbers first, which 8-bit floats do not want.
Source: ONNX operator documentation, QuantizeLinear-19 (``saturate``), and "FP8 Formats for Deep Learning"
(arXiv:2209.05433) for E4M3.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LIBRARY: list[torch.library.Library] = []


def quantize_float8(input: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``input`` (float32, any shape) in units of ``scale``, as 8-bit floats of the same shape.

    >>> quantize_float8(torch.tensor([0.3, -900.0]), 1.0, torch.float8_e4m3fn).tolist()
    [0.3125, -448.0]
    """
    limit = torch.finfo(dtype).max
    return (input / scale).clamp(-limit, limit).to(dtype)


def dequantize_float8(input: Tensor, scale: float) -> Tensor:
    """The float32 values that 8-bit floats stand for.

    >>> dequantize_float8(torch.tensor([2.0]).to(torch.float8_e4m3fn), 0.5)
    tensor([1.])
    """
    return input.to(torch.float32) * scale


def register_float8() -> None:
    """Make the operators callable as ``torch.ops.backquant.*``. Does nothing when they are already.

    >>> register_float8()
    >>> q = torch.ops.backquant.quantize_float8(torch.tensor([0.3]), 1.0, torch.float8_e4m3fn)
    >>> torch.ops.backquant.dequantize_float8(q, 1.0)
    tensor([0.3125])
    """
    if _LIBRARY:
        return
    library = torch.library.Library("backquant", "FRAGMENT")
    library.define("quantize_float8(Tensor input, float scale, ScalarType dtype) -> Tensor")
    library.define("dequantize_float8(Tensor input, float scale) -> Tensor")
    library.impl("quantize_float8", quantize_float8, "CompositeExplicitAutograd")
    library.impl("dequantize_float8", dequantize_float8, "CompositeExplicitAutograd")
    _LIBRARY.append(library)
