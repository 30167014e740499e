"""Scales as TOSA writes them, and RESCALE, which multiplies by them.

A requantization with ``fixed_point`` and ``half_up`` is a RESCALE with one rounding: the same multiplier,
and 31 less its shift. Sums of 48 bits are multiplied by 15 bits of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from backquant.conformance.tosa.graph import Graph

_WIDE = "int48"


class NoTosaError(Exception):
    """The kernel has no form in TOSA here."""


def multiplier_and_shift(real: float, bits: int = 31) -> tuple[int, int]:
    """As TOSA writes a positive scale: ``multiplier / 2**shift``, the multiplier of 31 or 15 bits.

    >>> multiplier_and_shift(0.5), multiplier_and_shift(0.5, 15)
    ((1073741824, 31), (16384, 15))
    """
    mantissa, exponent = math.frexp(real)
    multiplier = math.floor(mantissa * (1 << bits) + 0.5)
    if multiplier == 1 << bits:
        multiplier, exponent = multiplier // 2, exponent + 1
    return multiplier, bits - exponent


def rescaled(
    graph: Graph,
    x: str,
    shape: Sequence[int],
    reals: Any,
    dtype: str,
    *,
    source: str = "int32",
    zero: int = 0,
    out_zero: int = 0,
    finer: int = 0,
) -> str:
    """RESCALE of ``x``; ``reals``: one, or one for each channel; ``finer``: bits to the left before it."""
    narrow = source == _WIDE
    bits = 15 if narrow else 31
    numbers = [multiplier_and_shift(float(real), bits) for real in np.atleast_1d(np.asarray(reals))]
    inputs = [
        x,
        graph.const([multiplier for multiplier, _ in numbers], "int16" if narrow else "int32"),
        graph.const([shift - finer for _, shift in numbers], "int8"),
        graph.const([zero], source),
        graph.const([out_zero], dtype),
    ]
    return graph.add(
        "RESCALE",
        inputs,
        shape,
        dtype,
        scale32=not narrow,
        rounding_mode="SINGLE_ROUND",
        per_channel=len(numbers) > 1,
        input_unsigned=False,
        output_unsigned=False,
    )


def clamped(graph: Graph, x: str, shape: Sequence[int], dtype: str, low: int, high: int) -> str:
    """CLAMP of ``x``; itself where these are all integers of its dtype."""
    whole = np.iinfo(dtype)
    if (low, high) == (whole.min, whole.max):
        return x
    ends = [list(np.array(end, dtype).tobytes()) for end in (low, high)]
    return graph.add(
        "CLAMP", [x], shape, dtype, min_val=ends[0], max_val=ends[1], nan_mode="PROPAGATE"
    )
