"""From sums in 32 bits to quantized values, in integers only: the arithmetic that accelerators have.

``real multiplier = input scale * weight scale / output scale`` becomes an integer of 32 bits and a shift:

    multiplier * 2**(shift - 31)    with 2**30 <= multiplier < 2**31

1. ``float``: the product in float64, rounded.
2. ``fixed_point``: one multiplication in 64 bits and one rounding shift.
3. ``fixed_point_twice``: gemmlowp's, which TensorFlow Lite computes by default: the high half of the doubled
   product, rounded (halves up) and saturated, then a rounding shift (halves away from zero).
4. ``shift``: the multiplier is a power of two, a rounding shift is all there is.

Pure functions on int64 tensors; sums have to fit into 32 bits. Sources: gemmlowp, ``fixedpoint/fixedpoint.h``
(SaturatingRoundingDoublingHighMul, RoundingDivideByPOT) and ``doc/quantization.md``; TensorFlow Lite,
``kernels/internal/quantization_util.cc`` (QuantizeMultiplier) and ``common.h``
(MultiplyByQuantizedMultiplier, with and without TFLITE_SINGLE_ROUNDING); "Quantization and Training of
Neural Networks for Efficient Integer-Arithmetic-Only Inference" (arXiv:1712.05877), section 2.2.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from backquant.dtypes.arithmetic import Rounding, round_to

_SLACK = 2**-18  # scales are float32: what rounding makes of a power of two is still that power
_LOW, _HIGH = -(1 << 31), (1 << 31) - 1
_FAR = 2.0**40  # steps: beyond any range, and within 64 bits


class Requantization(Enum):
    """How sums become quantized values; numbered as in the module's docstring."""

    FLOAT = "float"
    FIXED_POINT = "fixed_point"
    FIXED_POINT_TWICE = "fixed_point_twice"
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
    sums = sums.to(torch.int64).clamp(_LOW, _HIGH)
    if arithmetic is Requantization.SHIFT:
        return _shifted(sums, shift_of(real), rounding)
    multiplier, shift = quantize_multiplier(real)
    if arithmetic is Requantization.FIXED_POINT_TWICE:
        left = (sums << shift.clamp(min=0)).clamp(_LOW, _HIGH)
        product = high_multiply(left, multiplier)
        return divide_by_power(product, (-shift).clamp(min=0), Rounding.HALF_AWAY)
    return _shifted(sums * multiplier, shift - 31, rounding)


def _shifted(x: Tensor, shift: Tensor, rounding: Rounding) -> Tensor:
    """``x * 2**shift``: to the left exactly, to the right rounded."""
    left = x << shift.clamp(0, 31)
    return divide_by_power(left, (-shift).clamp(0, 62), rounding)
