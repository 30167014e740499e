"""Kernels of the integer reference as TOSA operators, for images as ``[batch, height, width, channels]``.

1. A requantization with ``fixed_point`` and ``half_up`` is a RESCALE with one rounding: the same multiplier,
   and 31 less its shift.
2. An addition is two RESCALEs to a step of 32 bits, ADD, and a RESCALE.
3. A convolution is of two or three dimensions; one of one dimension is of height 1, a linear layer has a
   kernel of 1 × 1. Weights have no zero point.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from backquant.conformance.tosa.graph import Array, Graph
from backquant.lower.kernels.integer.elementwise import IntegerBinary, IntegerJoin
from backquant.lower.kernels.integer.pooling import IntegerAverage, IntegerMaxPool
from backquant.lower.kernels.integer.values import IntegerTable
from backquant.lower.kernels.integer.weighted import IntegerWeighted


class NoTosaError(Exception):
    """The kernel has no form in TOSA here."""


def multiplier_and_shift(real: float) -> tuple[int, int]:
    """As TOSA writes a positive scale: ``multiplier / 2**shift``, with 31 bits.

    >>> multiplier_and_shift(0.5)
    (1073741824, 31)
    """
    mantissa, exponent = math.frexp(real)
    multiplier = math.floor(mantissa * (1 << 31) + 0.5)
    if multiplier == 1 << 31:
        multiplier, exponent = multiplier // 2, exponent + 1
    return multiplier, 31 - exponent


def rescaled(  # size: the numbers of the operator
    graph: Graph,
    x: str,
    shape: Sequence[int],
    reals: Any,
    dtype: str = "int8",
    *,
    source: str = "int32",
    zero: int = 0,
    out_zero: int = 0,
    finer: int = 0,
) -> str:
    """RESCALE of ``x``; ``reals``: one, or one for each channel; ``finer``: bits to the left before it."""
    numbers = [multiplier_and_shift(float(real)) for real in np.atleast_1d(np.asarray(reals))]
    inputs = [
        x,
        graph.const([multiplier for multiplier, _ in numbers], "int32"),
        graph.const([shift - finer for _, shift in numbers], "int8"),
        graph.const([zero], source),
        graph.const([out_zero], dtype),
    ]
    return graph.add(
        "RESCALE",
        inputs,
        shape,
        dtype,
        scale32=True,
        rounding_mode="SINGLE_ROUND",
        per_channel=len(numbers) > 1,
        input_unsigned=False,
        output_unsigned=False,
    )


def _weighted(graph: Graph, kernel: IntegerWeighted, inputs: Sequence[Array], out: Array) -> str:
    config = kernel.config
    x, weight = inputs[0], kernel.weight.numpy()
    if kernel.weight_zero_point.any():
        raise NoTosaError("weights with a zero point")
    dims = max(2, len(config.stride))
    x, weight, channels = _image(x, dims), _kernel(weight, dims), out.shape[1]
    if config.operator == "linear":
        x, channels = inputs[0].reshape(-1, 1, 1, inputs[0].shape[-1]), out.shape[-1]
        weight = kernel.weight.numpy().reshape(channels, 1, 1, -1)
    windows = weight.shape[1:-1]
    bias = np.zeros(channels) if kernel.bias is None else kernel.bias.numpy()
    tail = [
        graph.const(np.resize(bias, channels), "int32"),
        graph.const([config.x_zero_point], "int8"),
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
        x_name, attribute["pad"] = _windowed(graph, x, shape, windows, attribute)
    else:
        x_name = graph.given(np.ascontiguousarray(x))
        op, kind = "TRANSPOSE_CONV2D", "TransposeConv2d"
        weight = kernel.weight.numpy().transpose(1, 2, 3, 0)
        attribute = _transposed_geometry(config)
    tail.append(graph.const([0], "int8"))
    sums = graph.add(
        op, [x_name, graph.const(weight, "int8"), *tail], shape, "int32",
        kind=kind, local_bound=False, acc_type="INT32", **attribute,
    )  # fmt: skip
    reals = kernel.unit.numpy() / config.out_scale
    return rescaled(graph, sums, shape, reals, out_zero=config.out_zero_point)


def _image(x: Array, dims: int) -> Array:
    """Channels last, with a height of 1 where there is none."""
    x = np.moveaxis(x, 1, -1)
    return x if x.ndim == dims + 2 else x[:, None]


def _kernel(weight: Array, dims: int) -> Array:
    weight = np.moveaxis(weight, 1, -1)
    return weight if weight.ndim == dims + 2 else weight[:, None]


def _shape_of(out: Array, operator: str, dims: int, x: Array) -> tuple[int, ...]:
    if operator == "linear":
        return (x.shape[0], 1, 1, out.shape[-1])
    return tuple(_image(out, dims).shape)


def _wide(numbers: Sequence[int], dims: int, usual: int) -> list[int]:
    return [*[usual] * (dims - len(numbers)), *numbers]


def _geometry(config: Any, dims: int) -> dict[str, Any]:
    padding = _wide(config.padding, dims, 0)
    return {
        "pad": [each for size in padding for each in (size, size)],
        "stride": _wide(config.stride, dims, 1),
        "dilation": _wide(config.dilation, dims, 1),
    }


def _windowed(
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


def _binary(graph: Graph, kernel: IntegerBinary, inputs: Sequence[Array], out: Array) -> str:
    config = kernel.config
    name = config.operator
    parts = list(zip(inputs, (config.x_scale, config.y_scale),
                     (config.x_zero_point, config.y_zero_point), strict=True))  # fmt: skip
    if name == "matmul":
        a, b = (value.reshape(-1, *value.shape[-2:]) for value in inputs)
        zeros = [graph.const([zero], "int8") for _, _, zero in parts]
        shape = (len(a), a.shape[1], b.shape[2])
        sums = graph.add("MATMUL", [graph.given(a), graph.given(b), *zeros], shape, "int32",
                         kind="MatMul")  # fmt: skip
    else:
        shape = out.shape
        finer = config.headroom if name in ("add", "sub") else 0
        common = 2 * max(config.x_scale, config.y_scale)
        wide = [
            rescaled(
                graph, graph.given(value), value.shape, _factor(config, name, scale, common),
                "int32", source="int8", zero=zero, finer=finer,
            )
            for value, scale, zero in parts
        ]  # fmt: skip
        if name == "mul":
            wide.append(graph.const([0], "int8"))
        more = {"nan_mode": "PROPAGATE"} if name in ("maximum", "minimum") else {}
        sums = graph.add(name.upper(), wide, shape, "int32", **more)
    if name in ("maximum", "minimum"):
        unit = 1.0
    elif name in ("add", "sub"):
        unit = common / config.out_scale / 2.0**config.headroom
    else:
        unit = config.x_scale * config.y_scale / config.out_scale
    return rescaled(graph, sums, shape, unit, out_zero=config.out_zero_point)


def _factor(config: Any, name: str, scale: float, common: float) -> float:
    """By what each operand of an operator is multiplied before it."""
    if name in ("add", "sub"):
        return scale / common
    return 1.0 if name == "mul" else scale / config.out_scale


def _max_pool(graph: Graph, kernel: IntegerMaxPool, inputs: Sequence[Array], out: Array) -> str:
    config = kernel.config
    if set(config.dilation) != {1} or len(config.kernel_size) > 2:
        raise NoTosaError("maxima of images without dilation only")
    geometry = {**_geometry(config, 2), "kernel": _wide(config.kernel_size, 2, 1)}
    geometry.pop("dilation")
    shape = _image(out, 2).shape
    x, geometry["pad"] = _windowed(graph, _image(inputs[0], 2), shape, geometry["kernel"], geometry)
    return graph.add("MAX_POOL2D", [x], shape, "int8", kind="MaxPool2d",
                     nan_mode="PROPAGATE", **geometry)  # fmt: skip


def _average(graph: Graph, kernel: IntegerAverage, inputs: Sequence[Array], out: Array) -> str:
    config = kernel.config
    x = inputs[0]
    if config.operator == "mean":
        return _mean(graph, config, x)
    if config.x_scale != config.out_scale:
        raise NoTosaError("averages on another scale")
    if config.operator == "adaptive_avg_pool":
        if set(config.output_size) != {1}:
            raise NoTosaError("windows of several sizes")
        image = _image(x, 2)
        size = list(image.shape[1:3])
        geometry = {"kernel": size, "stride": size, "pad": [0] * 4}
    else:
        if (any(config.padding) and config.count_include_pad) or config.divisor_override:
            raise NoTosaError("averages that count padding")
        image = _image(x, 2)
        geometry = {
            "kernel": _wide(config.kernel_size, 2, 1),
            "stride": _wide(config.stride, 2, 1),
            "pad": _geometry_pad(config.padding),
        }
    zeros = [graph.const([zero], "int8") for zero in (config.x_zero_point, config.out_zero_point)]
    shape = _image(out, 2).shape
    given, geometry["pad"] = _windowed(graph, image, shape, geometry["kernel"], geometry)
    return graph.add("AVG_POOL2D", [given, *zeros], shape, "int8", kind="AvgPool2d",
                     acc_type="INT32", **geometry)  # fmt: skip


def _geometry_pad(padding: Sequence[int]) -> list[int]:
    return [each for size in _wide(padding, 2, 0) for each in (size, size)]


def _mean(graph: Graph, config: Any, x: Array) -> str:
    shape = list(x.shape)
    value = rescaled(graph, graph.given(x), shape, 1.0, "int32", source="int8",
                     zero=config.x_zero_point)  # fmt: skip
    count = 1
    for dim in config.dim:
        count *= shape[dim]
        shape[dim] = 1
        value = graph.add(
            "REDUCE_SUM", [value], shape, "int32", axis=dim % x.ndim, kind="ReduceSum"
        )
    real = config.x_scale / count / config.out_scale
    return rescaled(graph, value, shape, real, out_zero=config.out_zero_point)


def _table(graph: Graph, kernel: IntegerTable, inputs: Sequence[Array], out: Array) -> str:
    if kernel.config.channels != 1 or inputs[0].dtype != np.int8:
        raise NoTosaError("one table of 8-bit integers only")
    table = graph.const(kernel.table.numpy().astype(np.int8), "int8")
    return graph.add("TABLE", [graph.given(inputs[0]), table], out.shape, "int8")


def _join(graph: Graph, kernel: IntegerJoin, inputs: Sequence[Array], out: Array) -> str:
    config = kernel.config
    if config.operator != "cat":
        raise NoTosaError(config.operator)
    parts = []
    for value, scale, zero, fits in zip(
        inputs, config.scales, config.zero_points, config.fits, strict=True
    ):
        x = graph.given(value)
        parts.append(
            x
            if fits
            else rescaled(graph, x, value.shape, scale / config.out_scale, source="int8",
                          zero=zero, out_zero=config.out_zero_point)
        )  # fmt: skip
    return graph.add("CONCAT", parts, out.shape, "int8", axis=config.dim % out.ndim)


_FORMS: dict[type, Callable[..., str]] = {
    IntegerWeighted: _weighted,
    IntegerBinary: _binary,
    IntegerMaxPool: _max_pool,
    IntegerAverage: _average,
    IntegerTable: _table,
    IntegerJoin: _join,
}


def translated(kernel: Any, inputs: Sequence[Tensor], out: Tensor) -> tuple[Graph, str]:
    """The graph of one kernel called with ``inputs``, and the tensor of its result; or ``NoTosaError``."""
    form = _FORMS.get(type(kernel))
    if form is None:
        raise NoTosaError(type(kernel).__name__)
    graph = Graph()
    arrays = [value.contiguous().numpy() for value in inputs]
    return graph, form(graph, kernel, arrays, out.numpy())


def in_our_order(found: Array, out: Tensor, kernel: Any) -> Array:
    """The result of TOSA in the order of axes that PyTorch has."""
    images = isinstance(kernel, (IntegerWeighted, IntegerMaxPool, IntegerAverage))
    name = getattr(kernel.config, "operator", "")
    if images and name not in ("linear", "mean"):
        found = np.moveaxis(found, -1, 1)
    return found.reshape(out.shape)
