"""The published definitions of gemmlowp and TensorFlow Lite, number by number, beside ours on tensors."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch

from backquant.dtypes.arithmetic import (
    Requantization,
    Rounding,
    divide_by_power,
    high_multiply,
    quantize_multiplier,
    requantize_sums,
)

LOW, HIGH = -(2**31), 2**31 - 1
EXTREMES = [0, 1, -1, 2, -2, 3, 5, -5, 127, -128, 2**30, -(2**30), HIGH, LOW, LOW + 1]
DRAWN = random.Random(0)
SUMS = EXTREMES + [DRAWN.randint(LOW, HIGH) for _ in range(300)]
SUMS += [DRAWN.randint(-(2**18), 2**18) for _ in range(300)]


def truncated(a: int, b: int) -> int:
    """Division as in C."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def doubling_high_multiply(a: int, b: int) -> int:
    """gemmlowp: SaturatingRoundingDoublingHighMul."""
    if a == b == LOW:
        return HIGH
    product = a * b
    nudge = 2**30 if product >= 0 else 1 - 2**30
    return truncated(product + nudge, 2**31)


def rounding_divide(x: int, exponent: int) -> int:
    """gemmlowp: RoundingDivideByPOT."""
    mask = 2**exponent - 1
    threshold = (mask >> 1) + (1 if x < 0 else 0)
    return (x >> exponent) + (1 if x & mask > threshold else 0)


def multiplier_of(real: float) -> tuple[int, int]:
    """TensorFlow Lite: QuantizeMultiplier."""
    mantissa, shift = math.frexp(real)
    whole = math.floor(Fraction(mantissa) * 2**31 + Fraction(1, 2))
    if whole == 2**31:
        whole, shift = whole // 2, shift + 1
    return (0, 0) if shift < -31 else (whole, shift)


def twice_rounded(x: int, multiplier: int, shift: int) -> int:
    """TensorFlow Lite: MultiplyByQuantizedMultiplier; a shift to the left saturates here."""
    left = max(LOW, min(HIGH, x * 2 ** max(shift, 0)))
    return rounding_divide(doubling_high_multiply(left, multiplier), max(-shift, 0))


def once_rounded(x: int, multiplier: int, shift: int) -> int:
    """TensorFlow Lite: the same with TFLITE_SINGLE_ROUNDING."""
    total = 31 - shift
    return (x * multiplier + 2 ** (total - 1)) >> total


def rounded(value: Fraction, mode: Rounding) -> int:
    floor = math.floor(value)
    rest = value - floor
    half = Fraction(1, 2)
    if mode is Rounding.DOWN or rest < half:
        return floor
    if rest > half or mode is Rounding.HALF_UP:
        return floor + 1
    return floor + (value > 0 if mode is Rounding.HALF_AWAY else floor % 2)


REALS = [1.0, 0.5, 0.75, 1 - 2**-53, 2**-31, 2**-33, 1.9999, 3.7, 0.0009765, 2**-8]
REALS += [math.exp(DRAWN.uniform(-18, 1)) for _ in range(60)]


def test_multipliers_are_those_of_tensorflow_lite() -> None:
    multipliers, shifts = quantize_multiplier(torch.tensor(REALS, dtype=torch.float64))
    assert list(zip(multipliers.tolist(), shifts.tolist(), strict=True)) == [
        multiplier_of(real) for real in REALS
    ]


def test_high_halves_are_those_of_gemmlowp() -> None:
    for factor in (2**30, HIGH, LOW, 2**30 + 12345):
        found = high_multiply(torch.tensor(SUMS), torch.tensor(factor))
        assert found.tolist() == [doubling_high_multiply(x, factor) for x in SUMS]


@pytest.mark.parametrize("mode", Rounding)
def test_rounding_shifts(mode: Rounding) -> None:
    for exponent in (0, 1, 2, 7, 30, 31):
        found = divide_by_power(torch.tensor(SUMS), torch.tensor(exponent), mode).tolist()
        assert found == [rounded(Fraction(x, 2**exponent), mode) for x in SUMS]
        if mode is Rounding.HALF_AWAY:
            assert found == [rounding_divide(x, exponent) for x in SUMS]


def test_fixed_point_is_that_of_tensorflow_lite() -> None:
    sums = torch.tensor(SUMS)
    for real in REALS:
        multiplier, shift = multiplier_of(real)
        given = torch.tensor(real, dtype=torch.float64)
        twice = requantize_sums(sums, given, Requantization.FIXED_POINT_TWICE, Rounding.HALF_AWAY)
        assert twice.tolist() == [twice_rounded(x, multiplier, shift) for x in SUMS]
        once = requantize_sums(sums, given, Requantization.FIXED_POINT, Rounding.HALF_UP)
        assert once.tolist() == [once_rounded(x, multiplier, shift) for x in SUMS]


@pytest.mark.parametrize("mode", Rounding)
def test_one_rounding_of_the_exact_product(mode: Rounding) -> None:
    sums = torch.tensor(SUMS)
    for real in REALS[:20]:
        multiplier, shift = multiplier_of(real)
        exact = Fraction(multiplier) * Fraction(2) ** (shift - 31)
        given = torch.tensor(real, dtype=torch.float64)
        found = requantize_sums(sums, given, Requantization.FIXED_POINT, mode)
        assert found.tolist() == [rounded(x * exact, mode) for x in SUMS]
        power = 2.0 ** math.ceil(math.log2(real))
        found = requantize_sums(sums, given, Requantization.SHIFT, mode)
        assert found.tolist() == [rounded(x * Fraction(power), mode) for x in SUMS]


def test_multipliers_by_channel_broadcast() -> None:
    sums = torch.tensor([[100, -7], [3, 9]])
    real = torch.tensor([[0.5], [0.25]])
    found = requantize_sums(sums, real, Requantization.FLOAT, Rounding.HALF_AWAY)
    assert found.tolist() == [[50, -4], [1, 2]]
