"""Softmax as TOSA operators.

1. How far each integer is below the largest chooses two entries of TABLE: the upper and the lower bits of its
   exponential, of 23 bits.
2. Their sum, moved to ``[2**30, 2**31)``, has a reciprocal, which three steps of Newton's method find (TOSA
   divides no numbers of that size), and by which the exponentials are multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backquant.conformance.tosa.graph import Array, Graph
from backquant.conformance.tosa.scales import NoTosaError, rescaled
from backquant.conformance.tosa.values import few
from backquant.lower.kernels.integer.normalized import IntegerSoftmax

_LOW_BITS, _LEAST_BITS = 9, 23  # of an exponential: those of the second table, and of the largest
_SLACK = 3  # an interpolated table's largest exponential is a little below 1
_PLACE_BITS = 7  # of a place between two entries
_LONGEST = 255  # exponentials whose sum has 31 bits
_ONE = 29  # bits below 1 of the reciprocal


def softmax(graph: Graph, kernel: IntegerSoftmax, inputs: Sequence[Array], out: Array) -> str:
    config, x = kernel.config, inputs[0]
    axis = config.dim % x.ndim
    if x.shape[axis] > _LONGEST:
        raise NoTosaError(f"sums of more than {_LONGEST} exponentials")
    row = [1 if each == axis else size for each, size in enumerate(x.shape)]
    powers = _powers(graph, kernel.table.numpy(), x, axis, row)
    total = graph.add("REDUCE_SUM", [powers], row, "int32", axis=axis)
    moved = graph.add("CLZ", [total], row, "int32")
    one = graph.const(np.ones([1] * x.ndim), "int32")
    up = graph.add("SUB", [moved, one], row, "int32")
    high = graph.add("LOGICAL_LEFT_SHIFT", [total, up], row, "int32")
    reciprocal = _reciprocal(graph, high, row, x.ndim)
    shares = _product(graph, powers, reciprocal, x.shape, _LEAST_BITS)
    bits = graph.const(np.full([1] * x.ndim, 31 - _LEAST_BITS + _SLACK), "int32")
    down = graph.add("SUB", [bits, moved], row, "int32")
    shares = graph.add("ARITHMETIC_RIGHT_SHIFT", [shares, down], x.shape, "int32", round=True)
    real = 2.0 ** (_SLACK - 30) / config.out_scale
    dtype = out.dtype.name
    return rescaled(graph, shares, x.shape, real, dtype, out_zero=config.out_zero_point)


def _powers(graph: Graph, table: Array, x: Array, axis: int, row: Sequence[int]) -> str:
    """Exponentials of how far each integer is below the largest, in ``2**-23``."""
    dtype = x.dtype.name
    given = graph.given(x)
    largest = graph.add("REDUCE_MAX", [given], row, dtype, axis=axis, nan_mode="PROPAGATE")
    wide = [
        rescaled(graph, value, shape, 1.0, "int32", source=dtype)
        for value, shape in ((largest, row), (given, x.shape))
    ]
    below = graph.add("SUB", wide, x.shape, "int32")
    if dtype == "int8":  # entries 256 and further, one for each distance
        entries = np.zeros(513, np.int64)
        entries[256:512] = table
        places = rescaled(graph, below, x.shape, float(1 << _PLACE_BITS), "int16")
    else:
        entries = few(table)
        start = graph.const(np.full([1] * x.ndim, 1 << 15), "int32")
        below = graph.add("SUB", [below, start], x.shape, "int32")
        places = rescaled(graph, below, x.shape, 1.0, "int16")
    upper = entries >> _LOW_BITS
    parts = []
    for part in (upper, entries - (upper << _LOW_BITS)):
        parts.append(graph.add("TABLE", [places, graph.const(part, "int16")], x.shape, "int32"))
    bits = graph.const(np.full([1] * x.ndim, _LOW_BITS), "int32")
    parts[0] = graph.add("LOGICAL_LEFT_SHIFT", [parts[0], bits], x.shape, "int32")
    whole = graph.add("ADD", parts, x.shape, "int32")
    bits = graph.const(np.full([1] * x.ndim, _PLACE_BITS), "int32")
    return graph.add("ARITHMETIC_RIGHT_SHIFT", [whole, bits], x.shape, "int32", round=True)


def _reciprocal(graph: Graph, x: str, shape: Sequence[int], rank: int) -> str:
    """``2**60 / x`` of ``x`` in ``[2**30, 2**31)``."""

    def number(value: float) -> str:
        return graph.const(np.full([1] * rank, round(value * 2**_ONE)), "int32")

    slope = number(32 / 17)
    line = _product(graph, x, slope, shape, 31)
    found = graph.add("SUB", [number(48 / 17), line], shape, "int32")
    for _ in range(3):
        product = _product(graph, x, found, shape, 31)
        off = graph.add("SUB", [number(1), product], shape, "int32")
        more = _product(graph, found, off, shape, _ONE)
        found = graph.add("ADD", [found, more], shape, "int32")
    return found


def _product(graph: Graph, x: str, y: str, shape: Sequence[int], bits: int) -> str:
    """``x * y / 2**bits``, rounded."""
    return graph.add("MUL", [x, y, graph.const([bits], "int8")], shape, "int32")
