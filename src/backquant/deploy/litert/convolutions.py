"""Convolutions and transposed convolutions.

1. The format pads by ``SAME`` or not at all; other paddings are an operator before the kernel.
2. A convolution along one axis is one of images of height 1.
3. A transposed convolution gives the whole result, of which the padding is cut off, where ``SAME`` does
   not do that; dilated ones have a kernel with zeros in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from backquant.deploy.litert.emitter import (
    Call,
    Constant,
    Table,
    UnsupportedError,
    Value,
    as_array,
    constant_tensor,
    from_image,
    image,
    image_output,
    pair,
    plain,
    window_options,
)
from backquant.deploy.litert.network import Array, Scales, Tensor, has_free
from backquant.deploy.litert.pools import SAME, VALID, Amounts, padded, same_padding

TABLE = Table()

# Weights and biases as kernels read them: arranged when the file is written, so that nothing moves them
# when it runs.
#
# Weights of integer kernels are int8 around zero, with one scale or one for each output channel; biases are
# int32 (int64 beside int16 activations) in steps of input × weight scale. A kernel in float reads integer
# weights after an operator that dequantizes them.

_INT32 = (-(1 << 31), (1 << 31) - 1)


def weight_of(call: Call) -> Constant:
    """The weight of a layer. Raises ``UnsupportedError`` where it is computed."""
    held = call.constant("weight")
    if held is None:
        raise UnsupportedError("a weight that is computed")
    return held


def has_integer_weight(axis: int) -> Callable[[Call], bool]:
    """Whether the weight is one of an integer kernel; ``axis``: of its output channels."""

    def fits(call: Call) -> bool:
        weight = call.constant("weight")
        if weight is None or weight.integers is None or weight.scales is None:
            return False
        if weight.integers.dtype != torch.int8 or any(weight.scales.zero_point):
            return False
        if len(weight.scales.scale) > 1 and weight.scales.axis != axis:
            return False
        return call.args.get("bias") is None or call.constant("bias") is not None

    return fits


def stored_weight(call: Call, arrange: Callable[[Array], Array], axis: int) -> Tensor:
    """The weight, arranged; ``axis``: where its output channels are then."""
    held = weight_of(call)
    if held.integers is None or held.scales is None or any(held.scales.zero_point):
        return constant_tensor(held.name, np.ascontiguousarray(arrange(as_array(held.value))))
    made = constant_tensor(held.name, np.ascontiguousarray(arrange(as_array(held.integers))))
    made.scales = Scales(held.scales.scale, held.scales.zero_point, axis)
    if call.integer:
        return made
    return call.emitter.dequantize(Value(made, plain(len(made.shape)))).tensor


def bias_of(call: Call, source: Tensor, weight: Tensor, channels: int) -> Tensor:
    """The bias, zeros where the layer has none."""
    held = call.constant("bias")
    if held is None and call.has("bias"):
        raise UnsupportedError("a bias that is computed")
    name = "bias" if held is None else held.name
    value = np.zeros(channels) if held is None else as_array(held.value).astype(np.float64)
    if not call.integer:
        return constant_tensor(name, value.astype(np.float32))
    assert source.scales is not None and weight.scales is not None
    steps = source.scales.scale[0] * np.array(weight.scales.scale, np.float64)
    rounded = np.clip(np.rint(value / steps), *_INT32)
    made = constant_tensor(name, rounded.astype(np.int64 if call.dtype == "INT16" else np.int32))
    made.scales = Scales(tuple(map(float, steps.astype(np.float32))), (0,) * len(steps), 0)
    return made


Pair = tuple[int, int]


@dataclass(frozen=True)
class _Window:
    """Kernel, stride and dilation along height and width; rule 2."""

    rank: int
    kernel: Pair
    stride: Pair
    dilation: Pair

    @classmethod
    def of(cls, call: Call, rank: int) -> _Window:
        kernel = pair(tuple(weight_of(call).value.shape[2:]), rank)
        stride, dilation = (pair(call.arg(name, 1), rank) for name in ("stride", "dilation"))
        return cls(rank, kernel, stride, dilation)


def _as_image_kernel(weight: Array) -> Array:
    """Rule 2."""
    return weight[:, :, None, :] if weight.ndim == 3 else weight


def _ordinary(weight: Array) -> Array:
    """Output channels, height, width, input channels."""
    return np.transpose(_as_image_kernel(weight), (0, 2, 3, 1))


def _depthwise(weight: Array) -> Array:
    """One, height, width, output channels."""
    return np.transpose(_as_image_kernel(weight), (1, 2, 3, 0))


@TABLE.rule("conv1d conv2d conv1d.padding conv2d.padding", has_integer_weight(0), fuses=True)
def _convolution(call: Call) -> Value:
    value = call.read("input")
    window = _Window.of(call, len(value.shape))
    source = image(call, value)
    groups, outputs = int(call.arg("groups", 1)), int(weight_of(call).value.shape[0])
    depthwise = groups > 1 and groups == source.shape[3]
    same = same_padding(source, window.kernel, window.stride, window.dilation)
    source, how = padded(call, source, _padding(call, window), same)
    arrange, axis = (_depthwise, 3) if depthwise else (_ordinary, 0)
    weight = stored_weight(call, arrange, axis)
    bias = bias_of(call, source, weight, outputs)
    options = window_options(call, window.stride, how)
    options |= dict(zip(("dilationHFactor", "dilationWFactor"), window.dilation, strict=True))
    if depthwise:
        options["depthMultiplier"] = outputs // groups
    code = "DEPTHWISE_CONV_2D" if depthwise else "CONV_2D"
    made = call.emitter.emit(code, (source, weight, bias), image_output(call), **options)
    return from_image(call, made, window.rank)


def _padding(call: Call, window: _Window) -> Amounts:
    """What is added before and after height and width."""
    given = call.arg("padding", 0)
    if given == "valid":
        return (0, 0), (0, 0)
    if given == "same":
        totals = [d * (k - 1) for k, d in zip(window.kernel, window.dilation, strict=True)]
        first, second = ((total // 2, total - total // 2) for total in totals)
        return first, second
    height, width = pair(given, window.rank, of_lines=0)
    return (height, height), (width, width)


# -- transposed ---------------------------------------------------------------------------------------
@TABLE.rule("conv_transpose1d conv_transpose2d.input", has_integer_weight(1))
def _transposed(call: Call) -> Value:
    value = call.read("input")
    window = _Window.of(call, len(value.shape))
    source = image(call, value)
    if int(call.arg("groups", 1)) > 1:
        raise UnsupportedError("a transposed convolution in groups")
    if has_free(source.shape):
        raise UnsupportedError("free sizes: the sizes of its result are in the file")
    padding = pair(call.arg("padding", 0), window.rank, of_lines=0)

    def arrange(weight: Array) -> Array:
        return _dilated(np.transpose(_as_image_kernel(weight), (1, 2, 3, 0)), window.dilation)

    weight = stored_weight(call, arrange, 0)
    bias = bias_of(call, source, weight, weight.shape[0])
    out = image_output(call)
    made, how = _whole(call, source, weight, out, window, padding)
    inputs = (call.emitter.integers(made.shape, "output_shape"), weight, source, bias)
    call.emitter.emit("TRANSPOSE_CONV", inputs, made, **window_options(call, window.stride, how))
    if made is not out:
        begin = call.emitter.integers((0, *padding, 0), "begin")
        call.emitter.emit("SLICE", (made, begin, call.emitter.integers(out.shape, "size")), out)
    return from_image(call, out, window.rank)


def _whole(
    call: Call, source: Tensor, weight: Tensor, out: Tensor, window: _Window, padding: Pair
) -> tuple[Tensor, int]:
    """Rule 3: the tensor that the kernel writes, and the padding that it has."""
    axes = list(zip(source.shape[1:3], window.stride, weight.shape[1:3], strict=True))
    whole = [(n - 1) * s + k for n, s, k in axes]
    wanted = out.shape[1:3]
    if tuple(whole) == wanted and not any(padding):
        return out, VALID
    cuts = [total - n for total, n in zip(whole, wanted, strict=True)]
    fits = (math.ceil(out / s) == n for out, (n, s, _) in zip(wanted, axes, strict=True))
    if all(fits) and all(c >= 0 and c // 2 == p for c, p in zip(cuts, padding, strict=True)):
        return out, SAME
    if any(pad + n > total for pad, n, total in zip(padding, wanted, whole, strict=True)):
        raise UnsupportedError("an output padding beyond what the kernel reaches")
    return call.emitter.like(out, (source.shape[0], *whole, weight.shape[0])), VALID


def _dilated(weight: Array, dilation: Sequence[int]) -> Array:
    """Rule 3.

    >>> _dilated(np.ones((1, 1, 2, 1)), (1, 2))[0, 0, :, 0].tolist()
    [1.0, 0.0, 1.0]
    """
    o, h, w, i = weight.shape
    sizes = (o, (h - 1) * dilation[0] + 1, (w - 1) * dilation[1] + 1, i)
    made = np.zeros(sizes, weight.dtype)
    made[:, :: dilation[0], :: dilation[1]] = weight
    return made
