"""Convolutions, linear layers and poolings as TOSA operators, for images with their channels last.

A convolution is of two or three dimensions; one of one dimension is of height 1, a linear layer has a kernel
of 1 × 1. Weights have no zero point. Sums of 16-bit values have 48 bits (EXT-INT16).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from backquant.conformance.tosa.graph import Array, Graph
from backquant.conformance.tosa.moves import NoTosaError, clamped, rescaled
from backquant.lower.kernels.integer.pooling import IntegerAverage, IntegerMaxPool
from backquant.lower.kernels.integer.weighted import IntegerConvAdd, IntegerWeighted

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
    x, weight, channels = image(x, dims), _kernel(weight, dims), out.shape[1]
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
    """Channels last, with a height of 1 where there is none."""
    x = np.moveaxis(x, 1, -1)
    return x if x.ndim == dims + 2 else x[:, None]


def _kernel(weight: Array, dims: int) -> Array:
    weight = np.moveaxis(weight, 1, -1)
    return weight if weight.ndim == dims + 2 else weight[:, None]


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
