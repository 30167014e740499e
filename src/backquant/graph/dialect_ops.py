"""Operators of the QDQ dialect beside PyTorch's: groups and blocks, 8-bit floats, roundings of hardware.

They are ``torch.ops.backquant.*`` once this module is imported.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from backquant.dtypes import (
    Granularity,
    QParams,
    Requantization,
    Rounding,
    block_of,
    dequantize_tensor,
    quantize_tensor,
    requantize_sums,
    round_to,
    stored_scale,
)
from backquant.errors import EngineError, InputError

# Groups and blocks as nodes: ``torch.ops.backquant.quantize_blocks`` and ``dequantize_blocks``.
#
#     q, scale, 0 = quantize_blocks(x)  at each call: the largest magnitude of each block becomes the dtype's
#                                       largest value, or is what the dtype of the scales makes of that
#     x = (q - zero_point) * scale      scale and zero point: one for each block of a grid over the tensor
#
# The operators of ``quantized_decomposed`` know groups along the last axis of a matrix only.


def quantize_blocks(
    input: Tensor,
    granularity: str,
    quant_min: int,
    quant_max: int,
    eps: float,
    dtype: torch.dtype,
    scale_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``input`` (float32) in the storage of ``dtype``, with the scales and zero points (0) of its blocks.

    Raises InputError where the blocks do not divide ``input``.

    >>> x = torch.tensor([[1.0, -6.0, 3.0, 0.5]])
    >>> q, scale, _ = quantize_blocks(x, "per_group(size=2)", -6, 6, 1e-9, torch.float4_e2m1fn_x2)
    >>> q.float().tolist(), scale.tolist()
    ([[1.0, -6.0, 6.0, 1.0]], [[1.0, 0.5]])
    """
    shared = Granularity.parse(granularity)
    wrong = shared.undivided(input.shape)
    if wrong is not None:
        raise InputError(
            f"blocks of {wrong.size} do not divide axis {wrong.axis} of {list(input.shape)}",
            where=f"activations quantized {shared.words}",
            fix=f"sizes that are a multiple of {wrong.size}",
        )
    block = shared.block(input.shape)
    sides = [side for n, b in zip(input.shape, block, strict=True) for side in (n // b, b)]
    inner = tuple(range(1, 2 * input.dim(), 2))
    largest = input.detach().abs().reshape(sides).amax(inner).double()
    scale = stored_scale((largest / quant_max).clamp(min=eps), scale_dtype, quant_max).float()
    zero_point = torch.zeros_like(scale, dtype=torch.int32)
    ends = (quant_min, quant_max)
    found = QParams(scale, zero_point, *ends, dtype, block=block)
    return quantize_tensor(input, found), scale, zero_point


def dequantize_blocks(input: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """The floats that ``input`` stands for, of its shape; ``scale`` and ``zero_point`` in that of the grid.

    >>> scale = torch.tensor([[0.5, 2.0]])
    >>> dequantize_blocks(torch.tensor([[1, 2, 3, 4]], dtype=torch.int8), scale, torch.zeros(1, 2))
    tensor([[0.5000, 1.0000, 6.0000, 8.0000]])
    """
    return dequantize_tensor(input, scale, zero_point, block=block_of(input.shape, scale.shape))


# Quantization to 8-bit floats: ``torch.ops.backquant.quantize_float8`` and ``dequantize_float8``.
#
#     q = float8(clamp(x / scale, -max, max))      rounded to the nearest, ties to even; max is 448 for E4M3
#
# and ``float(q) * scale`` back.
#
# The operators of ``quantized_decomposed`` round to whole numbers first, which 8-bit floats do not want.
# Source: ONNX operator documentation, QuantizeLinear-19 (``saturate``), and "FP8 Formats for Deep Learning"
# (arXiv:2209.05433) for E4M3.

_ROUNDED = (torch.float32, torch.float16, torch.bfloat16)


def quantize_float8(input: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """``input`` (float32, float16 or bfloat16, any shape) in units of ``scale``, as 8-bit floats of the same
    shape. Raises ``TypeError`` for other dtypes, as the integers' operators do.

    >>> quantize_float8(torch.tensor([0.3, -900.0]), 1.0, torch.float8_e4m3fn).tolist()
    [0.3125, -448.0]
    """
    if input.dtype not in _ROUNDED:
        raise TypeError(f"expecting values of dtype float32, but got {input.dtype}")
    limit = torch.finfo(dtype).max
    return (input.float() / scale).clamp(-limit, limit).to(dtype)


def dequantize_float8(input: Tensor, scale: float) -> Tensor:
    """The float32 values that 8-bit floats stand for.

    >>> dequantize_float8(torch.tensor([2.0]).to(torch.float8_e4m3fn), 0.5)
    tensor([1.])
    """
    return input.to(torch.float32) * scale


# Quantization as hardware rounds: ``torch.ops.backquant.quantize_rounded`` and ``requantize``.
#
#     quantize_rounded    q = clamp(round(x / scale) + zero_point), in the rounding that is named
#     requantize          x holds sums in steps of ``unit``: they are taken back to integers, and requantized
#                         by the arithmetic that is named (``backquant.dtypes.arithmetic``)
#
# The operators of ``quantized_decomposed`` round halves to even, and know of no sums.


def quantize_rounded(
    input: Tensor,
    scale: float,
    zero_point: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    rounding: str,
) -> Tensor:
    """``input`` (float32, any shape) as integers of the same shape.

    >>> quantize_rounded(torch.tensor([0.5, 1.5, -0.5]), 1.0, 0, -128, 127, torch.int8, "half_up").tolist()
    [1, 2, 0]
    """
    steps = round_to(input.double() / scale, Rounding(rounding)) + zero_point
    return steps.clamp(quant_min, quant_max).to(dtype)


def requantize(
    input: Tensor,
    unit: Tensor,
    axis: int,
    scale: float,
    zero_point: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    arithmetic: str,
    rounding: str,
) -> Tensor:
    """Sums as integers of the same shape; ``unit``: their step, one or one for each slice along ``axis``.

    >>> sums = torch.tensor([[0.25, -0.5]])
    >>> unit = torch.tensor([0.25, 0.25])
    >>> requantize(sums, unit, 1, 0.5, 3, -128, 127, torch.int8, "fixed_point", "half_up").tolist()
    [[4, 2]]
    """
    if unit.numel() > 1:
        shape = [1] * input.dim()
        shape[axis] = -1
        unit = unit.reshape(shape)
    else:
        unit = unit.reshape(())
    step = unit.double()
    sums = torch.round(input.double() / step).to(torch.int64)
    made = requantize_sums(sums, step / scale, Requantization(arithmetic), Rounding(rounding))
    return (made + zero_point).clamp(quant_min, quant_max).to(dtype)


_STEPS = "float scale, int zero_point, int quant_min, int quant_max, ScalarType dtype"
_LIBRARY = torch.library.Library("backquant", "FRAGMENT")
for _operator, _schema in {
    quantize_blocks: "(Tensor input, str granularity, int quant_min, int quant_max, float eps, "
    "ScalarType dtype, ScalarType? scale_dtype=None) -> (Tensor, Tensor, Tensor)",
    dequantize_blocks: "(Tensor input, Tensor scale, Tensor zero_point) -> Tensor",
    quantize_float8: "(Tensor input, float scale, ScalarType dtype) -> Tensor",
    dequantize_float8: "(Tensor input, float scale) -> Tensor",
    quantize_rounded: f"(Tensor input, {_STEPS}, str rounding) -> Tensor",
    requantize: f"(Tensor input, Tensor unit, int axis, {_STEPS}, str arithmetic, str rounding) -> Tensor",
}.items():
    _LIBRARY.define(f"{_operator.__name__}{_schema}")
    _LIBRARY.impl(_operator.__name__, _operator, "CompositeExplicitAutograd")


# The quantize/dequantize operators on plain integer tensors: ``torch.ops.quantized_decomposed``.
#
# The dispatcher allows one registration per operator and process, and PyTorch's own (which Inductor
# loads, too) is not loaded by ``import torch``. So PyTorch's is loaded when it is asked for.

# The module of this PyTorch that registers the operators. Its name is data: nothing is imported
# from it.
_REGISTRATION = "torch.ao.quantization.fx._decomposed"


def register_quantized_decomposed() -> None:
    """Make ``torch.ops.quantized_decomposed.*`` callable. Does nothing when it is already.

    Raises:
        EngineError: this PyTorch has no such operators.

    >>> register_quantized_decomposed()
    >>> op = torch.ops.quantized_decomposed.quantize_per_tensor.default
    >>> op(torch.tensor([0.5]), 0.1, 0, -128, 127, torch.int8)
    tensor([5], dtype=torch.int8)
    """
    if hasattr(torch.ops.quantized_decomposed, "quantize_per_tensor"):
        return
    try:
        importlib.import_module(_REGISTRATION)
    except ImportError as error:
        raise EngineError(
            "this PyTorch has no quantized_decomposed operators",
            where=f"torch {torch.__version__}",
            fix="pip install 'torch>=2.12,<2.16'",
        ) from error
