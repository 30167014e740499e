"""Kernels of the integer reference, and what moves integers between them, as TOSA operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backquant.conformance.tosa.moves import (
    Array,
    Graph,
    Move,
    NoTosaError,
    clamped,
    moved,
    rescaled,
)
from backquant.dtypes import between_entries
from backquant.lower.kernels.integer.elementwise import IntegerBinary, IntegerJoin
from backquant.lower.kernels.integer.lookup_tables import IntegerTable
from backquant.lower.kernels.integer.normalized import IntegerSoftmax
from backquant.lower.kernels.integer.pooling import IntegerAverage, IntegerMaxPool
from backquant.lower.kernels.integer.resize import IntegerBilinear
from backquant.lower.kernels.integer.resize import nearest as by_nearest
from backquant.lower.kernels.integer.weighted import IntegerConvAdd, IntegerWeighted

# Convolutions, linear layers and poolings as TOSA operators, for images with their channels last.
#
# A convolution is of two or three dimensions; one of one dimension is of height 1, a linear layer has a
# kernel of 1 × 1. Weights have no zero point. Sums of 16-bit values have 48 bits (EXT-INT16).

_SUMS = {"int8": "int32", "int16": "int48"}


def weighted(graph: Graph, kernel: IntegerWeighted, inputs: Sequence[Array], out: Array) -> str:
    config = kernel.config
    if isinstance(kernel, IntegerConvAdd) or config.is_float or kernel.table is not None:
        raise NoTosaError("sums that become something else than integers under one scale")
    if config.negative_slope != 1.0:
        raise NoTosaError("sums below 0 with a scale of their own")
    sums, shape, wide = _sums(graph, kernel, inputs, out)
    reals = kernel.unit.numpy() / config.out_scale
    dtype = out.dtype.name
    made = rescaled(graph, sums, shape, reals, dtype, source=wide, out_zero=config.out_zero_point)
    return clamped(graph, made, shape, dtype, config.quant_min, config.quant_max)


def _sums(
    graph: Graph, kernel: IntegerWeighted, inputs: Sequence[Array], out: Array
) -> tuple[str, tuple[int, ...], str]:
    """The sums, their shape and dtype."""
    config = kernel.config
    x, weight = inputs[0], kernel.weight.numpy()
    if kernel.weight_zero_point.any():
        raise NoTosaError("weights with a zero point")
    dims = max(2, len(config.stride))
    x, weight, channels = image(x, dims), image(weight, dims), out.shape[1]
    if config.operator == "linear":
        x, channels = inputs[0].reshape(-1, 1, 1, inputs[0].shape[-1]), out.shape[-1]
        weight = kernel.weight.numpy().reshape(channels, 1, 1, -1)
    windows = weight.shape[1:-1]
    wide = _SUMS[x.dtype.name]
    bias = np.zeros(channels) if kernel.bias is None else kernel.bias.numpy()
    tail = [
        graph.const(np.resize(bias, channels), wide),
        graph.const([config.x_zero_point], x.dtype.name),
    ]
    transposed = "transpose" in config.operator
    depthwise = config.groups > 1
    if depthwise and (transposed or dims != 2 or config.groups != x.shape[-1]):
        raise NoTosaError("groups that are not channels")
    op = f"CONV{dims}D"
    kind = f"Conv{dims}d"
    if depthwise:
        op, kind = "DEPTHWISE_CONV2D", "DepthwiseConv2d"
        weight = weight.transpose(1, 2, 0, 3).reshape(*weight.shape[1:3], x.shape[-1], -1)
    shape = _shape_of(out, config.operator, dims, x)
    attribute = _geometry(config, dims)
    if not transposed:
        x_name, attribute["pad"] = windowed(graph, x, shape, windows, attribute)
    else:
        x_name = graph.given(np.ascontiguousarray(x))
        op, kind = "TRANSPOSE_CONV2D", "TransposeConv2d"
        weight = kernel.weight.numpy().transpose(1, 2, 3, 0)
        attribute = _transposed_geometry(config)
    tail.append(graph.const([0], "int8"))
    sums = graph.add(
        op, [x_name, graph.const(weight, "int8"), *tail], shape, wide,
        kind=kind, local_bound=False, acc_type=wide.upper(), **attribute,
    )  # fmt: skip
    return sums, shape, wide


def image(x: Array, dims: int) -> Array:
    """An image or a weight with channels last, and a height of 1 where there is none."""
    x = np.moveaxis(x, 1, -1)
    return x if x.ndim == dims + 2 else x[:, None]


def _shape_of(out: Array, operator: str, dims: int, x: Array) -> tuple[int, ...]:
    if operator == "linear":
        return (x.shape[0], 1, 1, out.shape[-1])
    return tuple(image(out, dims).shape)


def _wide(numbers: Sequence[int], dims: int, usual: int) -> list[int]:
    return [*[usual] * (dims - len(numbers)), *numbers]


def _geometry(config: Any, dims: int) -> dict[str, Any]:
    return {
        "pad": _both_ends(config.padding, dims),
        "stride": _wide(config.stride, dims, 1),
        "dilation": _wide(config.dilation, dims, 1),
    }


def _both_ends(padding: Sequence[int], dims: int) -> list[int]:
    return [each for size in _wide(padding, dims, 0) for each in (size, size)]


def windowed(
    graph: Graph, x: Array, out: Sequence[int], windows: Sequence[int], geometry: dict[str, Any]
) -> tuple[str, list[int]]:
    """An image as an operator with windows is given it, and its padding: TOSA refuses what no window reads,
    so the padding behind an axis is what the last window reads, and values behind that are sliced off."""
    stride, starts = geometry["stride"], geometry["pad"][::2]
    dilation = geometry.get("dilation", [1] * len(stride))
    pad, kept = [], list(x.shape)
    for axis, (window, step, far, start) in enumerate(
        zip(windows, stride, dilation, starts, strict=True), 1
    ):
        read = (out[axis] - 1) * step + (window - 1) * far + 1
        behind = read - start - x.shape[axis]
        kept[axis] += min(behind, 0)
        pad += [start, max(behind, 0)]
    name = graph.given(np.ascontiguousarray(x))
    if kept != list(x.shape):
        parts = [graph.shape([0] * x.ndim), graph.shape(kept)]
        name = graph.add("SLICE", [name, *parts], kept, x.dtype.name)
    return name, pad


def _transposed_geometry(config: Any) -> dict[str, Any]:
    if len(config.stride) != 2 or set(config.dilation) != {1}:
        raise NoTosaError("transposed convolutions of images without dilation only")
    pairs = zip(config.padding, config.output_padding, strict=True)
    return {
        "out_pad": [each for pad, more in pairs for each in (-pad, more - pad)],
        "stride": list(config.stride),
    }


def max_pool(graph: Graph, kernel: IntegerMaxPool, inputs: Sequence[Array], out: Array) -> str:
    config = kernel.config
    if set(config.dilation) != {1} or len(config.kernel_size) > 2:
        raise NoTosaError("maxima of images without dilation only")
    geometry = {**_geometry(config, 2), "kernel": _wide(config.kernel_size, 2, 1)}
    geometry.pop("dilation")
    shape = image(out, 2).shape
    x, geometry["pad"] = windowed(graph, image(inputs[0], 2), shape, geometry["kernel"], geometry)
    return graph.add("MAX_POOL2D", [x], shape, out.dtype.name, kind="MaxPool2d",
                     nan_mode="PROPAGATE", **geometry)  # fmt: skip


def average(graph: Graph, kernel: IntegerAverage, inputs: Sequence[Array], out: Array) -> str:
    config = kernel.config
    x, dtype = inputs[0], out.dtype.name
    if config.operator == "mean":
        return _mean(graph, config, x, config.dim, dtype)
    if config.x_scale != config.out_scale:
        if config.operator != "adaptive_avg_pool" or set(config.output_size) != {1}:
            raise NoTosaError("averages of several windows on another scale")
        return _mean(graph, config, x, range(-len(config.output_size), 0), dtype)
    if config.operator == "adaptive_avg_pool":
        geometry = _equal_windows(image(x, 2).shape[1:3], image(out, 2).shape[1:3])
    else:
        if (any(config.padding) and config.count_include_pad) or config.divisor_override:
            raise NoTosaError("averages that count padding")
        geometry = {
            "kernel": _wide(config.kernel_size, 2, 1),
            "stride": _wide(config.stride, 2, 1),
            "pad": _both_ends(config.padding, 2),
        }
    zeros = [graph.const([zero], dtype) for zero in (config.x_zero_point, config.out_zero_point)]
    shape = image(out, 2).shape
    given, geometry["pad"] = windowed(graph, image(x, 2), shape, geometry["kernel"], geometry)
    return graph.add("AVG_POOL2D", [given, *zeros], shape, dtype, kind="AvgPool2d",
                     acc_type="INT32", **geometry)  # fmt: skip


def _equal_windows(sizes: Sequence[int], wanted: Sequence[int]) -> dict[str, Any]:
    """The windows of adaptive pooling, where all of an axis are of one size."""
    if any(size % number for size, number in zip(sizes, wanted, strict=True)):
        raise NoTosaError("windows of several sizes")
    each = [size // number for size, number in zip(sizes, wanted, strict=True)]
    return {"kernel": each, "stride": each, "pad": [0] * 4}


def _mean(graph: Graph, config: Any, x: Array, dims: Sequence[int], dtype: str) -> str:
    """Sums axis by axis, whose number is a part of the factor."""
    shape = list(x.shape)
    value = rescaled(graph, graph.given(x), shape, 1.0, "int32", source=x.dtype.name,
                     zero=config.x_zero_point)  # fmt: skip
    count = 1
    for dim in dims:
        count *= shape[dim]
        shape[dim] = 1
        value = graph.add(
            "REDUCE_SUM", [value], shape, "int32", axis=dim % x.ndim, kind="ReduceSum"
        )
    real = config.x_scale / count / config.out_scale
    return rescaled(graph, value, shape, real, dtype, out_zero=config.out_zero_point)


# Operators of two tensors, tables and concatenation as TOSA operators.
#
# 1. An addition is two RESCALEs to a step of 32 bits, ADD, and a RESCALE.
# 2. A function of 8-bit values is a TABLE of 256 entries. One of 16-bit values has 513, interpolates, and is
# rescaled by the 7 bits that a place between two entries has; one that only limits them is a CLAMP.
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


# Interpolation as RESIZE, for images ``[batch, height, width, channels]``.
_LARGEST = 1 << 11  # of the numbers that a scale is a ratio of


def nearest(graph: Graph, x: Array, out: Array, places: Sequence[Array]) -> str:
    """The nearest neighbour; ``places``: which line and column each of the result is.

    TOSA rounds where PyTorch takes the whole part, so that a place begins half a step further down.
    """
    axes = []
    for given, place in zip(x.shape[2:], places, strict=True):
        size = len(place)
        times = size // given
        if size % given or not np.array_equal(place, np.arange(size) // times):
            raise NoTosaError("the nearest neighbour by a factor that is not whole")
        axes.append((2 * times, 2, 1 - times, times - 1))
    return _resize(graph, x, out, axes, "NEAREST", out.dtype.name)


def bilinear(graph: Graph, kernel: IntegerBilinear, inputs: Sequence[Array], out: Array) -> str:
    config, x = kernel.config, inputs[0]
    if config.scale_factor and not config.align_corners and not config.recompute_scale_factor:
        factors: Sequence[Any] = (config.scale_factor * 2)[:2]
    else:
        factors = (None, None)
    axes = [
        _centred(given, size, factor) if not config.align_corners else _aligned(given, size)
        for given, size, factor in zip(x.shape[2:], out.shape[2:], factors, strict=True)
    ]
    wide = _SUMS[out.dtype.name]
    sums = _resize(graph, x, out, axes, "BILINEAR", wide)
    parts = axes[0][0] * axes[1][0]
    shape = _shape(out)
    if config.x_zero_point or config.out_zero_point:  # on int32: 16-bit values have none
        zero = graph.const(np.full([1] * 4, config.x_zero_point * parts), wide)
        sums = graph.add("SUB", [sums, zero], shape, wide)
    real = config.x_scale / config.out_scale / parts
    return rescaled(
        graph, sums, shape, real, out.dtype.name, source=wide, out_zero=config.out_zero_point
    )


def _centred(given: int, size: int, factor: Any) -> tuple[int, int, int, int]:
    """Scale (two numbers), offset and border, where places are those of the middles of values."""
    ratio = Fraction(size, given) if factor is None else Fraction(float(factor)).limit_denominator()
    numerator, denominator = 2 * ratio.numerator, 2 * ratio.denominator
    offset = ratio.denominator - ratio.numerator
    border = denominator * (size - 1) - (given - 1) * numerator + offset
    return _admitted(numerator, denominator, offset, border)


def _aligned(given: int, size: int) -> tuple[int, int, int, int]:
    """As ``_centred``, where the first and the last values stay where they are."""
    if min(given, size) == 1:
        return _admitted(1, 1, 0, size - given)
    ratio = Fraction(size - 1, given - 1)
    return _admitted(ratio.numerator, ratio.denominator, 0, 0)


def _admitted(
    numerator: int, denominator: int, offset: int, border: int
) -> tuple[int, int, int, int]:
    fits = numerator <= _LARGEST and denominator < 16 * numerator
    if (
        not fits
        or not -numerator <= offset < 16 * numerator
        or not -16 * numerator <= border < numerator
    ):
        raise NoTosaError(f"a factor of {numerator} / {denominator}")
    return numerator, denominator, offset, border


def _resize(
    graph: Graph,
    x: Array,
    out: Array,
    axes: Sequence[tuple[int, int, int, int]],
    mode: str,
    dtype: str,
) -> str:
    if x.ndim != 4:
        raise NoTosaError("interpolation of something else than images")
    scale = [each for axis in axes for each in axis[:2]]
    shapes = [graph.shape(each) for each in (scale, [a[2] for a in axes], [a[3] for a in axes])]
    last = np.ascontiguousarray(np.moveaxis(x, 1, -1))
    given, shape = graph.given(last), _shape(out)
    if len(x) == 1 or mode == "BILINEAR":
        return graph.add("RESIZE", [given, *shapes], shape, dtype, mode=mode)
    one, image = [1, *shape[1:]], [1, *last.shape[1:]]
    found = []
    for number in range(len(x)):  # Ethos-U55 takes one image
        part = [graph.shape([number, 0, 0, 0]), graph.shape(image)]
        each = graph.add("SLICE", [given, *part], image, x.dtype.name)
        found.append(graph.add("RESIZE", [each, *shapes], one, dtype, mode=mode))
    return graph.add("CONCAT", found, shape, dtype, axis=0)


def _shape(out: Array) -> list[int]:
    return list(np.moveaxis(out, 1, -1).shape)


# Softmax as TOSA operators.
#
# 1. How far each integer is below the largest chooses two entries of TABLE: the upper and the lower bits
#   of its exponential, of 23 bits.
# 2. Their sum, moved to ``[2**30, 2**31)``, has a reciprocal, which three steps of Newton's method find (TOSA
# divides no numbers of that size), and by which the exponentials are multiplied.
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


_FORMS: dict[type, Callable[..., str]] = {
    IntegerWeighted: weighted,
    IntegerBinary: binary,
    IntegerMaxPool: max_pool,
    IntegerAverage: average,
    IntegerTable: table,
    IntegerJoin: join,
    IntegerBilinear: bilinear,
    IntegerSoftmax: softmax,
}

#: Whose results are images, with their channels last.
_IMAGES = (IntegerWeighted, IntegerMaxPool, IntegerAverage, IntegerBilinear)


def translated(kernel: Any, inputs: Sequence[Tensor], out: Tensor) -> tuple[Graph, str]:
    """The graph of one kernel called with ``inputs``, and the tensor of its result; or ``NoTosaError``."""
    form = _FORMS.get(type(kernel))
    if form is None:
        raise NoTosaError(type(kernel).__name__)
    graph = Graph()
    arrays = [value.contiguous().numpy() for value in inputs]
    return graph, form(graph, kernel, arrays, out.numpy())


def translated_move(move: Move, x: Tensor) -> tuple[Graph, str]:
    """The graph of ``move(x)``, and the tensor of its result; or ``NoTosaError``."""
    graph = Graph()
    return graph, moved(graph, move, x.contiguous().numpy())


def translated_rescale(x: Tensor, out: Tensor, arguments: Sequence[Any]) -> tuple[Graph, str]:
    """As ``translated_move``, of ``values.rescale`` with its other ``arguments``."""
    graph = Graph()
    scale, zero, out_scale, out_zero = arguments[:4]
    dtype, source = (str(each.numpy().dtype) for each in (out, x))
    name = rescaled(
        graph, graph.given(x.contiguous().numpy()), out.shape, scale / out_scale, dtype,
        source=source, zero=zero, out_zero=out_zero,
    )  # fmt: skip
    return graph, name


def translated_nearest(move: Move, x: Tensor) -> tuple[Graph, str]:
    """As ``translated_move``, where ``move`` takes the nearest neighbours of an image."""
    graph = Graph()
    out = move(x).numpy()
    rows = move(torch.arange(x.shape[2]).reshape(1, 1, -1, 1).expand(x.shape))
    columns = move(torch.arange(x.shape[3]).expand(x.shape))
    places = [rows[0, 0, :, 0].numpy(), columns[0, 0, 0].numpy()]
    return graph, nearest(graph, x.contiguous().numpy(), out, places)


def in_our_order(found: Array, out: Tensor, kernel: Any) -> Array:
    """The result of TOSA in the order of axes that PyTorch has. ``kernel``: one of the integer reference, or
    the function that moves values."""
    name = getattr(getattr(kernel, "config", None), "operator", "")
    images = kernel is by_nearest or isinstance(kernel, _IMAGES)
    if images and name not in ("linear", "mean"):
        found = np.moveaxis(found, -1, 1)
    return found.reshape(out.shape)
