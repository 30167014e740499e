"""Poolings, means, softmax, resizes and other operators over several places.

1. The format leaves padding out of averages: where PyTorch counts it, an operator before the kernel adds
   it. Maxima are padded with the lowest value.
2. An adaptive average over the whole image is a mean, over whole windows an average with these, else a
   product with a matrix along each axis.
3. Softmax is over the axis that lies last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from backquant.deploy.litert.arithmetic import UNIT, in_steps
from backquant.deploy.litert.emitter import (
    Call,
    Constant,
    Table,
    UnsupportedError,
    Value,
    always,
    constant_tensor,
    from_image,
    image,
    image_output,
    last,
    pair,
    window_options,
    without,
)
from backquant.deploy.litert.network import LIMITS, Scales, Tensor, has_free

TABLE = Table()

# Padding of images: what kernels do themselves (``SAME``), and what an operator before them does.

SAME, VALID = 0, 1  # the schema's numbers
Amounts = tuple[tuple[int, int], tuple[int, int]]


def same_padding(
    source: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Amounts | None:
    """What ``SAME`` adds before and after height and width; ``None`` where these are free.

    >>> image = Tensor("x", (1, 8, 9, 3), "FLOAT32")
    >>> same_padding(image, (3, 3), (2, 2), (1, 1))
    ((0, 1), (1, 1))
    """
    if has_free(source.shape[1:3]) and tuple(stride) != (1, 1):
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
    made = call.emitter.like(source, (n, h + top + bottom, w + left + right, c))
    inputs = [source, call.emitter.pairs(rows)]
    lowest = value is not None
    if lowest and source.scales is not None:
        low = LIMITS[source.dtype][0]
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


def _pool(code: str, call: Call) -> Value:
    value = call.read("self")
    rank = len(value.shape)
    source = image(call, value)
    if max(pair(call.arg("dilation", 1), rank)) > 1:
        raise UnsupportedError("a dilated pooling")
    made = image_output(call)
    kernel, stride, padding = _window(call, rank)
    amounts = _amounts(source.shape[1:3], made.shape[1:3], kernel, stride, padding)
    if code == "MAX_POOL_2D":
        same = same_padding(source, kernel, stride, (1, 1))
        source, how = padded(call, source, amounts, same, -math.inf)
    else:
        source, how = padded(call, source, amounts, None)
    call.emitter.emit(code, (source,), made, **_options(call, kernel, stride, how))
    return from_image(call, made, rank)


def _options(call: Call, kernel: Sequence[int], stride: Sequence[int], how: int) -> dict[str, Any]:
    sizes = {"filterHeight": kernel[0], "filterWidth": kernel[1]}
    return window_options(call, stride, how) | sizes


def _amounts(
    sizes: Sequence[int],
    wanted: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> Amounts:
    """What is added before and after height and width; a result rounded up reads beyond the end."""
    rows = []
    for n, out, k, s, pad in zip(sizes, wanted, kernel, stride, padding, strict=True):
        rows.append((pad, max(pad, (out - 1) * s + k - n - pad)))
    return rows[0], rows[1]


def _averages_as_the_format(call: Call) -> bool:
    """Rule 1, for what cannot be said with an operator before the kernel."""
    if call.arg("divisor_override") is not None or call.arg("ceil_mode", False):
        return False
    _, _, padding = _window(call, len(call.shape))
    return bool(call.arg("count_include_pad", True)) or not any(padding)


@TABLE.rule("avg_pool1d avg_pool2d", _averages_as_the_format, keeps=True)
def _average(call: Call) -> Value:
    made = _pool("AVERAGE_POOL_2D", call)
    if _averages_as_the_format(call):
        return made
    if has_free(call.shape[2:]):
        raise UnsupportedError("an average of a free size that divides by other counts")
    factor = Constant("counts", _divided_otherwise(call, call.read("self").shape))
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


def _whole_windows(call: Call) -> bool:
    held = call.held(call.args["self"])
    sizes = held.integers.shape if hasattr(held, "integers") else ()
    return all(n % out == 0 for n, out in zip(sizes[2:], call.shape[2:], strict=False))


def _several(call: Call) -> bool:
    """Whether the result has several places: a mean of all of them has qparams of its own."""
    return any(size > 1 for size in call.shape[2:])


@TABLE.rule("adaptive_avg_pool1d adaptive_avg_pool2d", _whole_windows, keeps=_several)
def _adaptive(call: Call) -> Value:
    """Rule 2."""
    value = call.read("self")
    rank = len(value.shape)
    if not _several(call):
        return _reduced("MEAN", call, range(2, rank), keep=True)
    source = image(call, value)
    if has_free(source.shape[1:3]):
        raise UnsupportedError("an adaptive average of a free size")
    made = image_output(call)
    axes = list(zip(source.shape[1:3], made.shape[1:3], strict=True))
    if any(n % out for n, out in axes):
        return from_image(call, _by_matrices(call, source, made), rank)
    windows = [n // out for n, out in axes]
    options = _options(call, windows, windows, VALID)
    call.emitter.emit("AVERAGE_POOL_2D", (source,), made, **options)
    return from_image(call, made, rank)


def _by_matrices(call: Call, source: Tensor, made: Tensor) -> Tensor:
    """Averages over windows of several sizes: along each axis a product with a matrix."""
    n, h, w, c = source.shape
    rows, columns = made.shape[1:3]
    emitter = call.emitter
    flat = emitter.reshape(source, (n, h, w * c))
    halfway = emitter.like(flat, (n, rows, w * c))
    emitter.emit("BATCH_MATMUL", (_averaging(call, h, rows), flat), halfway)
    lines = emitter.reshape(halfway, (n * rows, w, c))
    done = emitter.like(lines, (n * rows, columns, c))
    emitter.emit("BATCH_MATMUL", (_averaging(call, w, columns), lines), done)
    return emitter.reshape(done, made.shape)


def _averaging(call: Call, size: int, outputs: int) -> Tensor:
    """The matrix, for a batch of one, that averages ``size`` places to ``outputs``."""
    eye = torch.eye(size).unsqueeze(0)
    matrix = torch.nn.functional.adaptive_avg_pool1d(eye, outputs).transpose(1, 2)
    return call.emitter.constant(Constant("windows", matrix), None, "").tensor


def _reduced(code: str, call: Call, axes: Sequence[int], keep: bool) -> Value:
    value = call.source
    rank = len(value.shape)
    axes = [axis % rank for axis in axes]
    places = sorted(value.layout.index(axis) for axis in axes)
    layout = value.layout if keep else without(value.layout, axes)
    return call.emit(
        code, (value.tensor, call.emitter.integers(places, "axes")), layout, keepDims=keep
    )


def _reduction(code: str, call: Call) -> Value:
    given = call.arg("dim")
    chosen = [given] if isinstance(given, int) else given or range(len(call.source.shape))
    return _reduced(code, call, chosen, bool(call.arg("keepdim", False)))


def _softmax(code: str, call: Call, **options: Any) -> Value:
    """Rule 3."""
    value = call.read("self")
    rank = len(value.shape)
    axis = call.arg("dim") % rank
    layout = value.layout if value.layout[-1] == axis else last(rank, axis)
    return call.emit(code, (call.emitter.laid(value, layout),), layout, **options)


def _resize(code: str, call: Call) -> Value:
    value = call.source
    if len(value.shape) != 4:
        raise UnsupportedError(f"resizing {len(value.shape)} axes")
    source = image(call, value)
    made = image_output(call)
    corners = bool(call.arg("align_corners", False))
    options = {"alignCorners": corners, "halfPixelCenters": not corners}
    if code == "RESIZE_NEAREST_NEIGHBOR":
        options = dict.fromkeys(options, False)
    if has_free(made.shape[1:3]):
        raise UnsupportedError("resizing to a free size")
    sizes = call.emitter.integers(made.shape[1:3])
    call.emitter.emit(code, (source, sizes), made, **options)
    return from_image(call, made, 4)


def _place_of_most(code: str, call: Call) -> Value:
    value, axis = call.read("self"), call.arg("dim")
    if axis is None:
        raise UnsupportedError("the place of the largest of all values")
    axis %= len(value.shape)
    keep = bool(call.arg("keepdim", False))
    layout = value.layout if keep else without(value.layout, [axis])
    place = call.emitter.integers([value.layout.index(axis)], "axis")
    out = call.output(layout)
    left = zip(value.tensor.shape, value.layout, strict=True)
    made = call.emitter.like(out, [n for n, each in left if each != axis]) if keep else out
    call.emitter.emit(code, (value.tensor, place), made, outputType=4)
    return Value(call.emitter.reshape(made, out.shape) if keep else made, layout)


@TABLE.rule("cumsum")
def _cumsum(call: Call) -> Value:
    value = call.read("self")
    axis = call.arg("dim") % len(value.shape)
    place = Constant("axis", torch.tensor(value.layout.index(axis), dtype=torch.int32))
    inputs = (value.tensor, call.emitter.constant(place, None, "").tensor)
    return call.emit("CUMSUM", inputs, value.layout)


_LOG_UNIT = {"INT8": Scales.one(16 / 256, 127)}

TABLE.add("max_pool1d max_pool2d", partial(_pool, "MAX_POOL_2D"), always, keeps=True, fuses=True)
TABLE.add("mean.dim", partial(_reduction, "MEAN"), lambda call: len(call.shape) <= 4)
TABLE.add("sum.dim_IntList", partial(_reduction, "SUM"))
TABLE.add("amax", partial(_reduction, "REDUCE_MAX"))
TABLE.add("amin", partial(_reduction, "REDUCE_MIN"))
TABLE.add("argmax", partial(_place_of_most, "ARG_MAX"))
TABLE.add("argmin", partial(_place_of_most, "ARG_MIN"))
TABLE.add("softmax.int _softmax", partial(_softmax, "SOFTMAX", beta=1.0), partial(in_steps, UNIT))
TABLE.add("log_softmax.int", partial(_softmax, "LOG_SOFTMAX"), partial(in_steps, _LOG_UNIT))
TABLE.add("upsample_nearest2d.vec", partial(_resize, "RESIZE_NEAREST_NEIGHBOR"), always, keeps=True)
TABLE.add("upsample_bilinear2d.vec", partial(_resize, "RESIZE_BILINEAR"), always, keeps=True)
