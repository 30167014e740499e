"""Poolings, means, softmax, resizes and other operators over several places.

1. The format leaves padding out of averages: where PyTorch counts it, an operator before the kernel adds
   it. Maxima are padded with the lowest value.
2. An adaptive average over the whole image is a mean, over whole windows an average with these, else a
   product with a matrix along each axis.
3. Softmax is over the axis that lies last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from backquant.deploy.litert.arithmetic import UNIT
from backquant.deploy.litert.emitter import (
    Call,
    Rule,
    Table,
    activation,
    from_image,
    image,
    image_output,
    pair,
)
from backquant.deploy.litert.lowered_values import (
    Constant,
    UnsupportedError,
    Value,
    constant_tensor,
    last,
    without,
)
from backquant.deploy.litert.network import Scales, Tensor
from backquant.operators import overload

# Padding of images: what kernels do themselves (``SAME``), and what an operator before them does.

SAME, VALID = 0, 1  # the schema's numbers
Amounts = tuple[tuple[int, int], tuple[int, int]]


def same_padding(
    source: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Amounts | None:
    """What ``SAME`` adds before and after height and width; ``None`` where these are free.

    >>> image = Tensor("x", (1, 8, 9, 3), (1, 8, 9, 3), "FLOAT32")
    >>> same_padding(image, (3, 3), (2, 2), (1, 1))
    ((0, 1), (1, 1))
    """
    if -1 in source.signature[1:3] and tuple(stride) != (1, 1):
        return None
    amounts = []
    for n, k, s, d in zip(source.shape[1:3], kernel, stride, dilation, strict=True):
        reach = (k - 1) * d + 1
        total = max(0, (math.ceil(n / s) - 1) * s + reach - n)
        amounts.append((total // 2, total - total // 2))
    return amounts[0], amounts[1]


def padded(
    call: Call, source: Tensor, amounts: Amounts, same: Amounts | None, value: float | None = None
) -> tuple[Tensor, int]:
    """The image that a kernel reads, and how the kernel pads it.

    ``value``: what is added, if not zero: the lowest value (``-inf``). A kernel that pads by itself adds
    that.
    """
    if not any(map(any, amounts)):
        return source, VALID
    if amounts == same:
        return source, SAME
    (top, bottom), (left, right) = amounts
    rows = [(0, 0), (top, bottom), (left, right), (0, 0)]
    n, h, w, c = source.shape
    shape = (n, h + top + bottom, w + left + right, c)
    made = call.emitter.like(source, shape)
    inputs = [source, call.emitter.pairs(rows)]
    lowest = value is not None
    if lowest and source.scales is not None:
        low = -128 if source.dtype == "INT8" else -32768
        if source.scales.zero_point[0] != low:
            number = constant_tensor("lowest", np.array([low], source.dtype.lower()))
            number.scales = source.scales
            inputs.append(number)
    elif lowest:
        inputs.append(constant_tensor("lowest", np.array([value], np.float32)))
    call.emitter.emit("PADV2" if len(inputs) > 2 else "PAD", inputs, made)
    return made, VALID


def _window(call: Call, rank: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    kernel = pair(call.arg("kernel_size"), rank)
    stride = pair(call.arg("stride") or call.arg("kernel_size"), rank)
    return kernel, stride, pair(call.arg("padding", 0), rank, of_lines=0)


def _pool(code: str) -> Callable[[Call], Value]:
    def write(call: Call) -> Value:
        value = call.read("self")
        rank = len(value.shape)
        source = image(call, value)
        if max(pair(call.arg("dilation", 1), rank)) > 1:
            raise UnsupportedError("a dilated pooling")
        made = image_output(call)
        kernel, stride, padding = _window(call, rank)
        amounts = _amounts(source.shape[1:3], made.shape[1:3], kernel, stride, padding)
        same = same_padding(source, kernel, stride, (1, 1))
        if code == "MAX_POOL_2D":
            source, how = padded(call, source, amounts, same, -math.inf)
        else:
            source, how = padded(call, source, amounts, None)
        options = _pool_options(kernel, stride, how, activation(call))
        call.emitter.emit(code, (source,), made, **options)
        return from_image(call, made, rank)

    return write


def _pool_options(
    kernel: Sequence[int], stride: Sequence[int], padding: int, fused: int
) -> dict[str, Any]:
    return {
        "padding": padding,
        "filterHeight": kernel[0],
        "filterWidth": kernel[1],
        "strideH": stride[0],
        "strideW": stride[1],
        "fusedActivationFunction": fused,
    }


def _amounts(
    sizes: Sequence[int],
    wanted: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> tuple[tuple[int, int], tuple[int, int]]:
    """What is added before and after height and width; a result rounded up reads beyond the end."""
    rows = []
    for n, out, k, s, pad in zip(sizes, wanted, kernel, stride, padding, strict=True):
        reach = (out - 1) * s + k
        beyond = max(pad, reach - n - pad) if reach - n - pad > pad else pad
        rows.append((pad, beyond))
    return rows[0], rows[1]


def _averages_as_the_format(call: Call) -> bool:
    """Rule 1, for what cannot be said with an operator before the kernel."""
    if call.arg("divisor_override") is not None:
        return False
    if call.arg("ceil_mode", False):
        return False
    rank = len(call.shape)
    _, _, padding = _window(call, rank)
    return bool(call.arg("count_include_pad", True)) or not any(padding)


def _average(call: Call) -> Value:
    made = _pool("AVERAGE_POOL_2D")(call)
    if _averages_as_the_format(call):
        return made
    shape = call.read("self").shape
    if -1 in call.signature[2:]:
        raise UnsupportedError("an average of a free size that divides by other counts")
    factor = Constant("counts", _divided_otherwise(call, shape))
    counts = call.emitter.laid(call.emitter.constant(factor, None, ""), made.layout)
    return call.emit("MUL", (made.tensor, counts), made.layout)


def _divided_otherwise(call: Call, shape: tuple[int, ...]) -> torch.Tensor:
    """What the kernel's averages, of images with zeros around, are multiplied by where PyTorch counts
    otherwise."""
    rank = len(shape)
    ones = torch.ones(1, 1, *shape[2:])
    arguments = {name: value for name, value in call.args.items() if name != "self"}
    wanted = call.node.target(ones, **arguments)  # type: ignore[operator]
    kernel, stride, padding = _window(call, rank)
    (top, bottom), (left, right) = _amounts(
        pair(shape[2:], rank), pair(call.shape[2:], rank), kernel, stride, padding
    )
    image_of_ones = ones if rank == 4 else ones[:, :, None]
    around = torch.nn.functional.pad(image_of_ones, (left, right, top, bottom))
    counted = torch.nn.functional.avg_pool2d(around, kernel, stride)
    return torch.as_tensor(wanted / counted.reshape(wanted.shape))


def _adaptive(call: Call) -> Value:
    """Rule 2."""
    value = call.read("self")
    rank = len(value.shape)
    if call.shape[2:] == (1,) * (rank - 2):
        return _reduced("MEAN", call, list(range(2, rank)), keep=True)
    source = image(call, value)
    if -1 in source.signature[1:3]:
        raise UnsupportedError("an adaptive average of a free size")
    made = image_output(call)
    axes = list(zip(source.shape[1:3], made.shape[1:3], strict=True))
    if any(n % out for n, out in axes):
        return from_image(call, _by_matrices(call, source, made), rank)
    windows = [n // out for n, out in axes]
    call.emitter.emit(
        "AVERAGE_POOL_2D", (source,), made, **_pool_options(windows, windows, 1, activation(call))
    )
    return from_image(call, made, rank)


def _by_matrices(call: Call, source: Tensor, made: Tensor) -> Tensor:
    """Averages over windows of several sizes: along each axis a product with a matrix."""
    n, h, w, c = source.shape
    batch = source.signature[0]
    rows, columns = made.shape[1:3]
    emitter = call.emitter
    flat = emitter.reshape(source, (n, h, w * c), (batch, h, w * c))
    halfway = emitter.like(flat, (n, rows, w * c))
    emitter.emit("BATCH_MATMUL", (_averaging(call, h, rows), flat), halfway)
    lines = emitter.reshape(halfway, (n * rows, w, c), (-1 if batch == -1 else n * rows, w, c))
    done = emitter.like(lines, (n * rows, columns, c))
    emitter.emit("BATCH_MATMUL", (_averaging(call, w, columns), lines), done)
    return emitter.reshape(done, made.shape, made.signature)


def _averaging(call: Call, size: int, outputs: int) -> Tensor:
    """The matrix, for a batch of one, that averages ``size`` places to ``outputs``."""
    eye = torch.eye(size).unsqueeze(0)
    matrix = torch.nn.functional.adaptive_avg_pool1d(eye, outputs).transpose(1, 2)
    return call.emitter.constant(Constant("windows", matrix), None, "").tensor


def _whole_windows(call: Call) -> bool:
    held = call.held(call.args["self"])
    sizes = held.integers.shape if hasattr(held, "integers") else ()
    return all(n % out == 0 for n, out in zip(sizes[2:], call.shape[2:], strict=False))


def _several(call: Call) -> bool:
    """Whether the result has several places: a mean of all of them has qparams of its own."""
    return any(size > 1 for size in call.shape[2:])


def _reduced(code: str, call: Call, axes: Sequence[int], keep: bool) -> Value:
    value = call.read("input" if "input" in call.args else "self")
    rank = len(value.shape)
    axes = [axis % rank for axis in axes]
    places = sorted(value.layout.index(axis) for axis in axes)
    layout = value.layout if keep else without(value.layout, axes)
    return call.emit(
        code, (value.tensor, call.emitter.integers(places, "axes")), layout, keepDims=keep
    )


def _reduction(code: str) -> Callable[[Call], Value]:
    def write(call: Call) -> Value:
        given = call.arg("dim")
        rank = len(call.read("input" if "input" in call.args else "self").shape)
        chosen = [given] if isinstance(given, int) else list(given or range(rank))
        return _reduced(code, call, chosen, bool(call.arg("keepdim", False)))

    return write


def _softmax(code: str) -> Callable[[Call], Value]:
    """Rule 3."""

    def write(call: Call) -> Value:
        value = call.read("self")
        rank = len(value.shape)
        axis = call.arg("dim") % rank
        layout = value.layout if value.layout[-1] == axis else last(rank, axis)
        source = call.emitter.laid(value, layout)
        options = {"beta": 1.0} if code == "SOFTMAX" else {}
        return call.emit(code, (source,), layout, **options)

    return write


_LOG_UNIT = {"INT8": Scales.one(16 / 256, 127)}


def _fixed(scales: dict[str, Scales]) -> Callable[[Call], bool]:
    return lambda call: call.scales == scales.get(call.dtype)


def _resize(code: str) -> Callable[[Call], Value]:
    def write(call: Call) -> Value:
        value = call.read("self" if "self" in call.args else "input")
        if len(value.shape) != 4:
            raise UnsupportedError(f"resizing {len(value.shape)} axes")
        source = image(call, value)
        made = image_output(call)
        corners = bool(call.arg("align_corners", False))
        if code == "RESIZE_NEAREST_NEIGHBOR":
            options = {"alignCorners": False, "halfPixelCenters": False}
        else:
            options = {"alignCorners": corners, "halfPixelCenters": not corners}
        if -1 in made.signature[1:3]:
            raise UnsupportedError("resizing to a free size")
        sizes = call.emitter.integers(made.shape[1:3])
        call.emitter.emit(code, (source, sizes), made, **options)
        return from_image(call, made, 4)

    return write


def _arg(code: str) -> Callable[[Call], Value]:
    def write(call: Call) -> Value:
        value = call.read("self")
        axis = call.arg("dim")
        if axis is None:
            raise UnsupportedError("the place of the largest of all values")
        axis %= len(value.shape)
        keep = bool(call.arg("keepdim", False))
        layout = without(value.layout, [axis])
        place = call.emitter.integers([value.layout.index(axis)], "axis")
        out = call.output(value.layout if keep else layout)
        shape = tuple(n for i, n in enumerate(value.tensor.shape) if value.layout[i] != axis)
        signature = tuple(
            n for i, n in enumerate(value.tensor.signature) if value.layout[i] != axis
        )
        made = call.emitter.like(out, shape, signature=signature) if keep else out
        call.emitter.emit(code, (value.tensor, place), made, outputType=4)
        if keep:
            made = call.emitter.reshape(made, out.shape, out.signature)
        return Value(made, value.layout if keep else layout)

    return write


def _cumsum(call: Call) -> Value:
    value = call.read("self")
    axis = call.arg("dim") % len(value.shape)
    place = call.emitter.constant(
        Constant("axis", torch.tensor(value.layout.index(axis), dtype=torch.int32)), None, ""
    )
    return call.emit("CUMSUM", (value.tensor, place.tensor), value.layout)


def _all(_: Call) -> bool:
    return True


def _int8_mean(call: Call) -> bool:
    return len(call.shape) <= 4


TABLE: Table = {
    overload("max_pool1d"): Rule(_pool("MAX_POOL_2D"), _all, keeps=True, fuses=True),
    overload("max_pool2d"): Rule(_pool("MAX_POOL_2D"), _all, keeps=True, fuses=True),
    overload("avg_pool1d"): Rule(_average, _averages_as_the_format, keeps=True),
    overload("avg_pool2d"): Rule(_average, _averages_as_the_format, keeps=True),
    overload("adaptive_avg_pool1d"): Rule(_adaptive, _whole_windows, keeps=_several),
    overload("adaptive_avg_pool2d"): Rule(_adaptive, _whole_windows, keeps=_several),
    overload("mean", "dim"): Rule(_reduction("MEAN"), _int8_mean),
    overload("sum", "dim_IntList"): Rule(_reduction("SUM")),
    overload("amax"): Rule(_reduction("REDUCE_MAX")),
    overload("amin"): Rule(_reduction("REDUCE_MIN")),
    overload("argmax"): Rule(_arg("ARG_MAX")),
    overload("argmin"): Rule(_arg("ARG_MIN")),
    overload("cumsum"): Rule(_cumsum),
    overload("softmax", "int"): Rule(_softmax("SOFTMAX"), _fixed(UNIT)),
    overload("_softmax"): Rule(_softmax("SOFTMAX"), _fixed(UNIT)),
    overload("log_softmax", "int"): Rule(_softmax("LOG_SOFTMAX"), _fixed(_LOG_UNIT)),
    overload("upsample_nearest2d", "vec"): Rule(
        _resize("RESIZE_NEAREST_NEIGHBOR"), _all, keeps=True
    ),
    overload("upsample_bilinear2d", "vec"): Rule(_resize("RESIZE_BILINEAR"), _all, keeps=True),
}
