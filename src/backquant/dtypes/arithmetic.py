"""Quantizing, dequantizing and requantizing plain tensors.

The rounding is that of PyTorch's CPU kernels, so that the integers and the dequantized floats are
equal bit for bit to those of ``torch.quantize_per_tensor`` and ``torch.quantize_per_channel``:

1. quantization:    ``q = clamp(round_half_even(x * (1 / scale) + zero_point))``
2. dequantization:  ``(q - zero_point) * scale``
3. narrow floats:   ``q = cast(clamp(x / scale))``; those without a scale are clamped and cast.

Rule 1 adds the zero point before the rounding: with an odd one, ties go the other way than if it
were added afterwards. (PyTorch's CUDA builds add it afterwards, on the CPU, too: their integers differ by
one step at ties.) With ``per_channel_affine_float_qparams`` it is a float. FBGEMM's code for
one 8-bit scale fuses the multiplication and the addition, so that they are rounded to float32 once
(about one weight in a million is a tie because of it); the other kernels round twice.
All products are float32 otherwise. No quantized tensor is made.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

from backquant.dtypes.qparams import TensorQParams
from backquant.dtypes.table import is_scaled_float, qdtype


class Rounding(Enum):
    """How a value between two integers is rounded."""

    HALF_EVEN = "half_even"
    HALF_AWAY = "half_away"  # as TensorFlow Lite and CMSIS-NN round
    HALF_UP = "half_up"  # an added half, and a shift to the right
    DOWN = "down"  # a shift to the right


_ROUND: dict[Rounding, Callable[[Tensor], Tensor]] = {
    Rounding.HALF_EVEN: torch.round,
    Rounding.HALF_AWAY: lambda x: torch.sign(x) * torch.floor(x.abs() + 0.5),
    Rounding.HALF_UP: lambda x: torch.floor(x + 0.5),
    Rounding.DOWN: torch.floor,
}


def round_to(x: Tensor, rounding: Rounding) -> Tensor:
    """The whole numbers that ``x`` is rounded to, in its dtype.

    >>> [round_to(torch.tensor([0.5, -1.5]), rounding).tolist() for rounding in Rounding]
    [[0.0, -2.0], [1.0, -2.0], [1.0, -1.0], [0.0, -2.0]]
    """
    return _ROUND[rounding](x)


# Larger tensors are rounded in parts, so that no float copy of them is needed.
_PART = 1 << 18


def quantize_tensor(x: Tensor, qparams: TensorQParams) -> Tensor:
    """``x`` (float32, any shape) as a plain tensor of the storage dtype, same shape and layout.

    >>> from backquant.dtypes import QParams
    >>> qparams = QParams(torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), -128, 127, torch.qint8, axis=0)
    >>> quantize_tensor(torch.tensor([[0.75, -100.0], [0.75, 0.25]]), qparams)
    tensor([[   2, -128],
            [   4,    2]], dtype=torch.int8)
    """
    row = qdtype(qparams.dtype)
    if not row.has_scale:
        limit = torch.finfo(row.storage).max
        return x.clamp(-limit, limit).to(row.storage, copy=True)
    if x.is_meta:  # torch interprets every operator on such a tensor in Python: 100 µs each
        return torch.empty_like(x, dtype=row.storage)
    spread = qparams.axis, qparams.block
    if row.is_float:
        steps = x / _spread(qparams.scale, x, *spread)
        kept = steps.clamp(qparams.quant_min, qparams.quant_max)
        return (_to_e2m1(kept) if row.bits == 4 else kept).to(row.storage)
    inverse = _spread(1.0 / qparams.scale, x, *spread)
    zero_point = _spread(qparams.zero_point, x, *spread)
    if x.dim() == 0 or x.numel() <= _PART:
        return _rounded(x, inverse, zero_point, qparams)
    quantized = torch.empty_like(x, dtype=row.storage)
    rows = max(1, _PART * x.size(0) // x.numel())
    by_row = inverse.dim() > 0 and inverse.size(0) > 1
    for start in range(0, x.size(0), rows):
        part = slice(start, start + rows)
        own = part if by_row else slice(None)
        scales = (inverse[own], zero_point[own]) if by_row else (inverse, zero_point)
        quantized[part] = _rounded(x[part], *scales, qparams)
    return quantized


def _to_e2m1(x: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, halves to the even mantissa.

    >>> _to_e2m1(torch.tensor([0.25, 0.75, 2.5, -5.0, 5.5])).tolist()
    [0.0, 1.0, 2.0, -4.0, 6.0]
    """
    exponent = (
        torch.frexp(x.abs().clamp(min=1.0)).exponent - 1
    )  # below 1 steps are those of subnormals
    step = torch.ldexp(torch.ones_like(x), exponent - 1)
    return torch.round(x / step) * step


def _rounded(x: Tensor, inverse: Tensor, zero_point: Tensor, qparams: TensorQParams) -> Tensor:
    storage = qparams.storage
    if inverse.dim() == 0 and storage.itemsize == 1:
        # The float64 product of two float32 is exact: one rounding to float32 in all.
        rounded = (x.double() * inverse).add_(zero_point).float().round_()
    else:
        rounded = (x * inverse).add_(zero_point).round_()
    if storage == torch.int32:  # float32 cannot hold the bounds of int32
        rounded = rounded.double()
    return rounded.clamp_(qparams.quant_min, qparams.quant_max).to(storage)


def dequantize_tensor(
    q: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    axis: int | None = None,
    block: tuple[int, ...] | None = None,
) -> Tensor:
    """The floats that ``q`` stands for, in the dtype of ``scale``; the arguments are those of ``QParams``.

    Floats without a scale are only cast.

    >>> dequantize_tensor(torch.tensor([[2, -128]], dtype=torch.int8), torch.tensor(0.5), torch.tensor(0))
    tensor([[  1., -64.]])
    """
    if q.is_floating_point():
        floats = q.to(scale.dtype)
        return floats * _spread(scale, q, axis, block) if is_scaled_float(q.dtype) else floats
    compute = torch.promote_types(torch.float32, scale.dtype)
    wide_scale = _spread(scale.to(compute), q, axis, block)
    zero_point = _spread(zero_point, q, axis, block)
    if q.dtype == torch.int32:  # float32 cannot hold the difference
        steps = (q.to(zero_point.dtype) - zero_point).to(compute)
    else:
        steps = q.to(compute) - zero_point.to(compute)
    return (steps * wide_scale).to(scale.dtype)


def _spread(
    values: Tensor, like: Tensor, axis: int | None, block: tuple[int, ...] | None
) -> Tensor:
    """One entry per channel or block, in the shape that broadcasts over ``like``."""
    if values.dim() == 0:
        return values
    if block is not None:
        for dim, size in enumerate(block):
            values = values.repeat_interleave(size, dim)
        return values
    shape = [1] * like.dim()
    shape[0 if axis is None else axis] = -1
    return values.reshape(shape)
