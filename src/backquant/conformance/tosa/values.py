"""Operators of two tensors, tables and concatenation as TOSA operators.

1. An addition is two RESCALEs to a step of 32 bits, ADD, and a RESCALE.
2. A function of 8-bit values is a TABLE of 256 entries. One of 16-bit values has 513, interpolates, and is
   rescaled by the 7 bits that a place between two entries has; one that only limits them is a CLAMP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from backquant.conformance.tosa.graph import Array, Graph
from backquant.conformance.tosa.scales import NoTosaError, clamped, rescaled
from backquant.dtypes import between_entries
from backquant.lower.kernels.integer.elementwise import IntegerBinary, IntegerJoin
from backquant.lower.kernels.integer.values import IntegerTable

_PIECES, _BITS = 512, 7  # of a table of 16-bit integers, and of a place between two entries


def binary(graph: Graph, kernel: IntegerBinary, inputs: Sequence[Array], out: Array) -> str:
    config = kernel.config
    name, dtype = config.operator, out.dtype.name
    if config.is_float:
        raise NoTosaError("products that become floats")
    if name == "matmul":
        return _matmul(graph, config, inputs, out)
    parts = list(zip(inputs, (config.x_scale, config.y_scale),
                     (config.x_zero_point, config.y_zero_point), strict=True))  # fmt: skip
    finer = config.headroom if name in ("add", "sub") else 0
    common = 2 * max(config.x_scale, config.y_scale)
    wide = [
        rescaled(
            graph, graph.given(value), value.shape, _factor(config, name, scale, common),
            "int32", source=value.dtype.name, zero=zero, finer=finer,
        )
        for value, scale, zero in parts
    ]  # fmt: skip
    if name == "mul":
        wide.append(graph.const([0], "int8"))
    more = {"nan_mode": "PROPAGATE"} if name in ("maximum", "minimum") else {}
    sums = graph.add(name.upper(), wide, out.shape, "int32", **more)
    unit = 1.0
    if name in ("add", "sub"):
        unit = common / config.out_scale / 2.0**config.headroom
    elif name == "mul":
        unit = config.x_scale * config.y_scale / config.out_scale
    made = rescaled(graph, sums, out.shape, unit, dtype, out_zero=config.out_zero_point)
    return clamped(graph, made, out.shape, dtype, config.quant_min, config.quant_max)


def _factor(config: Any, name: str, scale: float, common: float) -> float:
    """By what each operand of an operator is multiplied before it."""
    if name in ("add", "sub"):
        return scale / common
    return 1.0 if name == "mul" else scale / config.out_scale


def _matmul(graph: Graph, config: Any, inputs: Sequence[Array], out: Array) -> str:
    a, b = inputs
    leading = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if a.ndim < 2 or b.ndim < 2 or (a.shape[:-2], b.shape[:-2]) != (leading, leading):
        raise NoTosaError("products of matrices that broadcast")
    a, b = (value.reshape(-1, *value.shape[-2:]) for value in inputs)
    zeros = [
        graph.const([zero], value.dtype.name)
        for value, zero in ((a, config.x_zero_point), (b, config.y_zero_point))
    ]
    shape = (len(a), a.shape[1], b.shape[2])
    wide = {"int8": "int32", "int16": "int48"}[a.dtype.name]
    sums = graph.add("MATMUL", [graph.given(a), graph.given(b), *zeros], shape, wide,
                     kind="MatMul")  # fmt: skip
    unit = config.x_scale * config.y_scale / config.out_scale
    return rescaled(
        graph, sums, shape, unit, out.dtype.name, source=wide, out_zero=config.out_zero_point
    )


def table(graph: Graph, kernel: IntegerTable, inputs: Sequence[Array], out: Array) -> str:
    x, channels = inputs[0], kernel.config.channels
    if x.dtype != out.dtype:
        raise NoTosaError("tables from one dtype to another")
    name = graph.given(x)
    entries = kernel.table.numpy().reshape(channels, -1)
    if channels == 1:
        return _looked_up(graph, name, x.shape, x.dtype.name, entries[0])
    shape = [*x.shape]
    shape[1] = 1
    parts = []
    for channel, own in enumerate(entries):
        begin = graph.shape([channel if axis == 1 else 0 for axis in range(x.ndim)])
        part = graph.add("SLICE", [name, begin, graph.shape(shape)], shape, x.dtype.name)
        parts.append(_looked_up(graph, part, shape, x.dtype.name, own))
    return graph.add("CONCAT", parts, out.shape, out.dtype.name, axis=1)


def _looked_up(graph: Graph, x: str, shape: Sequence[int], dtype: str, entries: Array) -> str:
    whole = np.iinfo(dtype)
    low, high = int(entries.min()), int(entries.max())
    if np.array_equal(entries, np.arange(whole.min, whole.max + 1).clip(low, high)):
        return clamped(graph, x, shape, dtype, low, high)
    if dtype == "int8":
        return graph.add("TABLE", [x, graph.const(entries, dtype)], shape, dtype)
    fine = graph.add("TABLE", [x, graph.const(few(entries), dtype)], shape, "int32")
    return rescaled(graph, fine, shape, 2.0**-_BITS, dtype)


def few(entries: Array) -> Array:
    """The 513 entries between which a table of 16-bit integers interpolates.

    >>> line = np.arange(-32768, 32768)
    >>> few(line)[[0, 1, 512]].tolist()
    [-32768, -32640, 32768]
    """
    step = 1 << _BITS
    first = entries[::step].astype(np.int64)
    last = int(entries[-1]) - int(first[-1])
    for slope in sorted({last * step // (step - 1) + more for more in (-1, 0, 1, 2)}):
        found = np.append(first, first[-1] + slope)
        if np.array_equal(between_entries(torch.as_tensor(found), len(entries)), entries):
            return found
    raise NoTosaError(
        "a table with an entry for each 16-bit integer (TOSA's have 513, which `table_entries: 513` says)"
    )


def join(graph: Graph, kernel: IntegerJoin, inputs: Sequence[Array], out: Array) -> str:
    config, dtype = kernel.config, out.dtype.name
    axis = config.dim % out.ndim
    parts = []
    for value, scale, zero, fits in zip(
        inputs, config.scales, config.zero_points, config.fits, strict=True
    ):
        name, shape = graph.given(value), value.shape
        if not fits:
            name = rescaled(graph, name, shape, scale / config.out_scale, dtype,
                            source=value.dtype.name, zero=zero,
                            out_zero=config.out_zero_point)  # fmt: skip
        if config.operator == "stack":
            shape = (*shape[:axis], 1, *shape[axis:])
            name = graph.add("RESHAPE", [name, graph.shape(shape)], shape, dtype)
        parts.append(name)
    return graph.add("CONCAT", parts, out.shape, dtype, axis=axis)
