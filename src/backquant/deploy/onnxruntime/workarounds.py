"""What ONNX Runtime's CPU provider computes wrong or in float, and what is written instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from backquant.deploy.onnx.rewrite import (
    OnnxCalls,
    array_of,
    comes_from,
    input_of,
    readers_of,
    rewrite,
)
from backquant.deploy.onnxruntime.grids import has_one_scale, same_grid
from backquant.operators import overload

# What clips values before a QuantizeLinear, clips the integers behind it instead.
#
# ONNX Runtime runs a product on integers where a QuantizeLinear reads it. A Relu or Clip between the two it
# takes away only where it knows that the quantization does the same: not behind a reshape, and not where the
# quantized range is wider than the bounds (6.03 over the 6 of a ReLU6); the product then runs in float.
# Rounding keeps the order of values, so that clipping to what the bounds become as integers, after the
# quantization, gives the same integers; where these are the ends of the integer type nothing is left to clip.
# Between a dequantize and a quantize node of one grid the integers themselves are clipped: ONNX Runtime
# has no Relu of integers.


_INFINITY = float("inf")


def clip_integers(model: Any) -> None:
    """Rewrite, in place, every Relu and Clip with constant bounds that only a QuantizeLinear reads."""
    rewrite(model, {"QuantizeLinear": _clip_behind})


def _clip_behind(node: Any) -> Any:
    if not has_one_scale(node):
        return None
    source, *bounds = _unclipped(node.inputs[0])
    if source is node.inputs[0] or source.producer() is None:
        return None
    scale, zero = map(array_of, node.inputs[1:])
    ends = np.iinfo(zero.dtype)
    steps = np.rint(np.array(bounds, np.float32) / scale.astype(np.float32).reshape(()))
    limits = np.clip(steps + int(zero.reshape(())), ends.min, ends.max).astype(zero.dtype)
    write, integers = OnnxCalls(node), source
    dequantize = comes_from(source, "DequantizeLinear")
    if dequantize is not None:
        if not same_grid(dequantize, node):
            return None
        integers = dequantize.inputs[0]
    elif limits.tolist() == [ends.min, ends.max]:
        node.replace_input_with(0, source)
        return None
    else:
        integers = write.again(source, *node.inputs[1:])
    return write.Clip(integers, *map(write.constant, limits))


def _unclipped(value: Any) -> tuple[Any, float, float]:
    """What is clipped before ``value``, by nodes that nothing else reads, and the bounds of all together."""
    low, high = -_INFINITY, _INFINITY
    while (bounds := _bounds(value)) is not None:
        low, high = max(low, bounds[0]), min(high, max(low, bounds[1]))
        value = value.producer().inputs[0]
    return value, low, high


def _bounds(value: Any) -> tuple[float, float] | None:
    node = value.producer()
    if node is None or len(value.uses()) != 1 or value.is_graph_output():
        return None
    if node.op_type == "Relu":
        return 0.0, _INFINITY
    if node.op_type != "Clip":
        return None
    given = [input_of(node, place) for place in (1, 2)]
    if any(bound is not None and bound.const_value is None for bound in given):
        return None
    low, high = map(array_of, given)
    return -_INFINITY if low is None else float(low), _INFINITY if high is None else float(high)


# What clips the floats of a product on integers, written as ``Max`` and ``Min``.
#
# ONNX Runtime looks through a Relu or Clip behind a product for the QuantizeLinear, and where none
# follows (the logarithm of a mel spectrogram) it leaves the product in float, though it has a kernel on
# integers that gives floats. Through Max and Min it does not look, and they give the same values.

_PRODUCTS = frozenset({"MatMul", "Gemm"})


def show_products(model: Any) -> None:
    """Rewrite, in place, every Relu and Clip of a product on integers whose result stays float."""
    rewrite(model, {"Relu": _as_bounds, "Clip": _as_bounds})


def _as_bounds(node: Any) -> Any:
    value, write = node.inputs[0], OnnxCalls(node)
    product = value.producer()
    if product is None or product.op_type not in _PRODUCTS:
        return None
    if not all(comes_from(each, "DequantizeLinear") for each in product.inputs[:2]):
        return None
    if all(reader.op_type == "QuantizeLinear" for reader in readers_of(node)):
        return None
    low, high = input_of(node, 1), input_of(node, 2)
    if node.op_type == "Relu":
        low = write.constant(np.zeros((), value.dtype.numpy()))
    for kind, bound in (("Max", low), ("Min", high)):
        value = value if bound is None else write.call(kind, value, bound)
    return value


# Outputs that are quantized for a reader inside of the model stay what they are.
#
# ONNX Runtime moves a QuantizeLinear before what only moves values (a Transpose of the keys, before the
# product of attention), and puts a DequantizeLinear behind it. Where the value that it comes to is an
# output of the model, too, the output becomes the dequantized one, rounded and clipped (1.31: it counts
# readers inside of the model only). So the file has the pair there, beside the output.

_MOVING = frozenset({"Flatten", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})


def keep_outputs(model: Any) -> None:
    """Write such pairs, in place."""
    rewrite(model, {"QuantizeLinear": _round_behind_output})


def _round_behind_output(node: Any) -> None:
    reader = _first_after_output(node) if has_one_scale(node) else None
    if reader is not None:
        value, write = reader.inputs[0], OnnxCalls(reader)
        rounded = write.QuantizeLinear(value, *node.inputs[1:])
        back = write.DequantizeLinear(rounded, *node.inputs[1:])
        rounded.shape = back.shape = value.shape
        reader.replace_input_with(0, back)


def _first_after_output(quantize: Any) -> Any:
    """The node that reads an output of the model, at the other end of nodes that only move values, and that
    nothing but ``quantize``, and quantizations alike, reads."""
    value = quantize.inputs[0]
    if not all(
        user.op_type == "QuantizeLinear" and has_one_scale(user) and same_grid(quantize, user)
        for user, _ in value.uses()
    ):
        return None
    while True:
        node = value.producer()
        if node is None or node.op_type not in _MOVING or value.is_graph_output():
            return None
        value = node.inputs[0]
        if len(value.uses()) > 1:
            return None
        if value.is_graph_output():
            return node


# Bicubic resizing to a known size, as one product with a matrix along the columns and one along the rows.
#
# ONNX Runtime (1.31) computes a bicubic ``Resize`` value by value: of CrossViT, which resizes its input, two
# thirds of the time. The matrices are what PyTorch's operator makes of unit ones.

_SIZES = 3  # the input
_MOST = 4096  # rows and columns: beyond, the products are more work than they save
_MODES = {"half_pixel": False, "align_corners": True}
_CUBIC = -0.75


def resize_by_products(model: Any) -> None:
    """Write such resizing so. Changes an ``onnx_ir.Model``."""
    rewrite(model, {"Resize": _as_products})


def _is_bicubic(node: Any) -> bool:
    named = {name: each.value for name, each in node.attributes.items()}
    if named.get("mode") != "cubic" or named.get("cubic_coeff_a", _CUBIC) != _CUBIC:
        return False
    if named.get("coordinate_transformation_mode", "half_pixel") not in _MODES or "axes" in named:
        return False
    return not named.get("antialias") and not named.get("exclude_outside")


def _as_products(node: Any) -> Any:
    import onnx_ir as ir

    source, *rest = node.inputs
    shape, sizes = source.shape, array_of(input_of(node, _SIZES))
    if not _is_bicubic(node) or sizes is None or any(each is not None for each in rest[:2]):
        return None
    if shape is None or len(shape) != 4 or not all(isinstance(size, int) for size in shape):
        return None
    old, new = [int(size) for size in shape], sizes.tolist()
    if old[:2] != new[:2] or sum(old[2:]) > _MOST or source.dtype != ir.DataType.FLOAT:
        return None
    mode = node.attributes.get_string("coordinate_transformation_mode", "half_pixel")
    write, corners = OnnxCalls(node), _MODES[str(mode)]
    columns = write.MatMul(source, write.constant(_matrix(old[3], new[3], corners).T))
    columns.shape = ir.Shape([*old[:3], new[3]])
    return write.MatMul(write.constant(_matrix(old[2], new[2], corners)), columns)


def _matrix(old: int, new: int, corners: bool) -> np.ndarray[Any, Any]:
    """What makes ``new`` values of ``old`` ones: ``[new, old]``.

    >>> _matrix(2, 2, corners=False).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    made = overload("upsample_bicubic2d")(torch.eye(old)[None, None], [new, old], corners)
    matrix: np.ndarray[Any, Any] = made[0, 0].numpy()
    return matrix
