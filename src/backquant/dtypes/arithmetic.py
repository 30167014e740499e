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


# Tables of functions of one value that hold fewer entries than there are integers, as accelerators have.
#
# 16-bit integers have tables of 513 entries in TensorFlow Lite and on Arm's Ethos-U: the upper bits of an
# integer choose two neighbours, the lower bits a place between them. Each entry is moved by half of what the
# line between two neighbours is off at its middle. Sources: TensorFlow Lite, ``kernels/internal/common.h``
# (``gen_lut``, ``lut_lookup``); Arm's Vela, ``ethosu/vela/lut.py``.


def interpolated_table(
    function: Callable[[Tensor], Tensor], low: int, size: int, entries: int, ends: tuple[int, int]
) -> Tensor:
    """What a lookup table of so many entries returns for each of ``size`` integers from ``low``: int64
    ``[size, …]``.

    Args:
        function: maps integers of the input, as float64 ``[n]``, to values in steps of the result, as
            float64 ``[n, …]``.
        low, size: the range of the input; ``size`` is a power of two.
        entries: one more than a power of two that is at most ``size``.
        ends: the smallest and the largest entry.

    >>> sine = lambda places: 1000 * torch.sin(places / 16384)
    >>> table = interpolated_table(sine, -(2**15), 2**16, 513, (-1000, 1000))
    >>> table[[0, 40000]].tolist(), sine(torch.tensor([-32768.0, 7232])).round().tolist()
    ([-909, 428], [-909.0, 427.0])
    """
    pieces = entries - 1
    step = (size - 1) / pieces
    places = low + torch.arange(pieces, dtype=torch.float64) * step
    here, middle, behind = (function(places + part * step) for part in (0.0, 0.5, 1.0))
    whole = _half_away(here)
    bend = _half_away((behind + whole) / 2) - _half_away(middle)
    last = function(torch.tensor([low + size - 1], dtype=torch.float64))
    table = torch.cat([whole - _half_away(bend / 2), _half_away(last)]).clamp(*ends).to(torch.int64)
    return between_entries(table, size)


def between_entries(table: Tensor, size: int) -> Tensor:
    """``table`` (int64 ``[entries, …]``) interpolated at ``size`` places, halves up.

    >>> between_entries(torch.tensor([0, 10, 4]), 8).tolist()
    [0, 3, 5, 8, 10, 9, 7, 6]
    """
    shift = (size // (len(table) - 1)).bit_length() - 1
    places = torch.arange(size)
    index = places >> shift
    part = (places - (index << shift)).reshape(-1, *[1] * (table.dim() - 1))
    slope = table[index + 1] - table[index]
    return table[index] + ((slope * part + ((1 << shift) >> 1)) >> shift)


def _half_away(x: Tensor) -> Tensor:
    return round_to(x, Rounding.HALF_AWAY)


# From sums in 32 bits to quantized values, in integers only: the arithmetic that accelerators have.
#
# ``real multiplier = input scale * weight scale / output scale`` becomes an integer of 32 bits and a shift:
#
#     multiplier * 2**(shift - 31)    with 2**30 <= multiplier < 2**31
#
# 1. ``float``: the product in float64, rounded.
# 2. ``fixed_point``: one multiplication in 64 bits and one rounding shift.
# 3. ``fixed_point_twice``: gemmlowp's, which TensorFlow Lite computes by default: the high half of the
# doubled    product, rounded (halves up) and saturated, then a rounding shift (halves away from zero). 4.
# ``shift``: the multiplier is a power of two, a rounding shift is all there is. 5. ``fixed_point_16``: as
# ``fixed_point``, the multiplier rounded to 16 bits: TensorFlow Lite beside activations of 16 bits.
#
# Pure functions on int64 tensors; sums have to fit into 32 bits. Sources: gemmlowp,
# ``fixedpoint/fixedpoint.h`` (SaturatingRoundingDoublingHighMul, RoundingDivideByPOT) and
# ``doc/quantization.md``; TensorFlow Lite, ``kernels/internal/quantization_util.cc`` (QuantizeMultiplier)
# and ``common.h`` (MultiplyByQuantizedMultiplier, with and without TFLITE_SINGLE_ROUNDING); "Quantization
# and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference" (arXiv:1712.05877),
# section 2.2.

_SLACK = 2**-18  # scales are float32: what rounding makes of a power of two is still that power
_LOW, _HIGH = -(1 << 31), (1 << 31) - 1
_FAR = 2.0**40  # steps: beyond any range, and within 64 bits


class Requantization(Enum):
    """How sums become quantized values; numbered as in the module's docstring."""

    FLOAT = "float"
    FIXED_POINT = "fixed_point"
    FIXED_POINT_TWICE = "fixed_point_twice"
    FIXED_POINT_16 = "fixed_point_16"
    SHIFT = "shift"


def quantize_multiplier(real: Tensor) -> tuple[Tensor, Tensor]:
    """Multipliers and shifts (int64, the shape of ``real``) of positive numbers, rounded half away from zero.

    What is below ``2**-32`` becomes 0, as in TensorFlow Lite.

    >>> quantize_multiplier(torch.tensor([0.5, 1.0, 0.75]))
    (tensor([1073741824, 1073741824, 1610612736]), tensor([0, 1, 0]))
    """
    mantissa, exponent = torch.frexp(real.double())
    multiplier = torch.floor(mantissa * (1 << 31) + 0.5).to(torch.int64)
    shift = exponent.to(torch.int64)
    full = multiplier == 1 << 31
    multiplier, shift = torch.where(full, multiplier // 2, multiplier), shift + full.to(torch.int64)
    none = shift < -31
    return multiplier.masked_fill(none, 0), shift.masked_fill(none, 0)


def shift_of(real: Tensor) -> Tensor:
    """The powers of two (int64, the shape of ``real``) that a shift multiplies by: the next above.

    >>> shift_of(torch.tensor([0.25, 0.3]))
    tensor([-2, -1])
    """
    return torch.ceil(torch.log2(real.double()) - _SLACK).to(torch.int64)


def high_multiply(a: Tensor, b: Tensor) -> Tensor:
    """``a * b / 2**31`` of 32-bit numbers in int64, halves up, saturated: SaturatingRoundingDoublingHighMul.

    >>> high_multiply(torch.tensor([3, -3, -(2**31)]), torch.tensor([2**30, 2**30, -(2**31)]))
    tensor([         2,         -1, 2147483647])
    """
    return ((a * b + (1 << 30)) >> 31).clamp(_LOW, _HIGH)


def divide_by_power(x: Tensor, exponent: Tensor, rounding: Rounding) -> Tensor:
    """``x / 2**exponent`` (``0 <= exponent <= 62``) in integers, rounded.

    >>> halves, one = torch.tensor([5, -5]), torch.tensor(1)
    >>> [divide_by_power(halves, one, rounding).tolist() for rounding in Rounding]
    [[2, -2], [3, -3], [3, -2], [2, -3]]
    """
    floor = x >> exponent
    if rounding is Rounding.DOWN:
        return floor
    twice = (x - (floor << exponent)) << 1  # of the rest, in [0, 2 * 2**exponent)
    whole = torch.ones_like(exponent) << exponent
    up = {
        Rounding.HALF_UP: twice >= whole,
        Rounding.HALF_AWAY: (twice > whole) | ((twice == whole) & (x >= 0)),
        Rounding.HALF_EVEN: (twice > whole) | ((twice == whole) & (floor & 1 == 1)),
    }[rounding]
    return floor + up.to(floor.dtype) * (exponent > 0)


def requantize_sums(
    sums: Tensor, real: Tensor, arithmetic: Requantization, rounding: Rounding
) -> Tensor:
    """``sums`` (integers of at most 32 bits, any shape) times ``real`` (broadcasts over them), as int64.

    The caller adds the zero point and saturates. ``fixed_point_twice`` has a rounding of its own and ignores
    ``rounding``. ``shift`` takes the next power of two above ``real``.

    >>> sums, real = torch.tensor([20, -20]), torch.tensor(0.125)
    >>> requantize_sums(sums, real, Requantization.FIXED_POINT, Rounding.HALF_UP)
    tensor([ 3, -2])
    >>> requantize_sums(sums, real, Requantization.FLOAT, Rounding.HALF_EVEN)
    tensor([ 2, -2])
    """
    if arithmetic is Requantization.FLOAT:
        return round_to(sums.double() * real.double(), rounding).clamp(-_FAR, _FAR).to(torch.int64)
    sums = sums.to(torch.int64)
    if arithmetic is not Requantization.FIXED_POINT_16:
        sums = sums.clamp(_LOW, _HIGH)
    if arithmetic is Requantization.SHIFT:
        return _shifted(sums, shift_of(real), rounding)
    multiplier, shift = quantize_multiplier(real)
    if arithmetic is Requantization.FIXED_POINT_TWICE:
        left = (sums << shift.clamp(min=0)).clamp(_LOW, _HIGH)
        product = high_multiply(left, multiplier)
        return divide_by_power(product, (-shift).clamp(min=0), Rounding.HALF_AWAY)
    if arithmetic is Requantization.FIXED_POINT_16:
        narrow = ((multiplier + (1 << 15)) >> 16).clamp(max=(1 << 15) - 1)
        return _shifted(sums * narrow, shift - 15, rounding)
    return _shifted(sums * multiplier, shift - 31, rounding)


def _shifted(x: Tensor, shift: Tensor, rounding: Rounding) -> Tensor:
    """``x * 2**shift``: to the left exactly, to the right rounded."""
    left = x << shift.clamp(0, 31)
    return divide_by_power(left, (-shift).clamp(0, 62), rounding)
