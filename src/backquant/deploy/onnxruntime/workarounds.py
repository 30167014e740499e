"""What ONNX Runtime's CPU provider computes wrong or in float, and what is written instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from backquant.deploy.onnx.initializers import add_initializer, drop_unused, replace_node
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
    for node in list(model.graph):
        if node.op_type == "QuantizeLinear" and has_one_scale(node):
            source, low, high = _unclipped(node.inputs[0])
            producer = source.producer()
            if source is node.inputs[0] or producer is None:
                continue
            if producer.op_type != "DequantizeLinear":
                _move(model, node, source, (low, high))
            elif same_grid(producer, node):
                _clip(model, node, producer.inputs[0], (low, high))
    drop_unused(model)


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
    given = [*node.inputs[1:], None, None][:2]
    if any(bound is not None and bound.const_value is None for bound in given):
        return None
    low, high = (None if b is None else float(b.const_value.numpy()) for b in given)
    return (-_INFINITY if low is None else low), (_INFINITY if high is None else high)


def _move(model: Any, node: Any, source: Any, bounds: tuple[float, float]) -> None:
    """The quantization reads ``source``, and its result is clipped where there is anything to clip."""
    node.replace_input_with(0, source)
    low, high, ends = _steps(node, bounds)
    if (low, high) != ends:
        clipped = _clip(model, node, node.outputs[0], bounds)
        clipped.replace_input_with(0, node.outputs[0])


def _clip(model: Any, node: Any, integers: Any, bounds: tuple[float, float]) -> Any:
    """A Clip of ``integers``, which takes the place of what ``node`` gives."""
    import onnx_ir as ir

    low, high, _ = _steps(node, bounds)
    result = node.outputs[0]
    limits = [add_initializer(model, np.array(end), f"{result.name}_bound") for end in (low, high)]
    made = ir.Node("", "Clip", [integers, *limits], name=f"{node.name}/Clip")
    clipped = made.outputs[0]
    clipped.name, clipped.type, clipped.shape = f"{result.name}_clipped", result.type, result.shape
    made.metadata_props.update(node.metadata_props)
    result.replace_all_uses_with(clipped, replace_graph_outputs=True)
    model.graph.insert_after(node, made)
    return made


def _steps(node: Any, bounds: tuple[float, float]) -> tuple[Any, Any, tuple[int, int]]:
    """The bounds as integers of a QuantizeLinear, and the ends of its type."""
    scale, zero = (value.const_value.numpy() for value in node.inputs[1:])
    ends = np.iinfo(zero.dtype)
    steps = np.rint(np.array(bounds, np.float32) / scale.astype(np.float32).reshape(()))
    low, high = np.clip(steps + int(zero.reshape(())), ends.min, ends.max).astype(zero.dtype)
    return low, high, (int(ends.min), int(ends.max))


# What clips the floats of a product on integers, written as ``Max`` and ``Min``.
#
# ONNX Runtime looks through a Relu or Clip behind a product for the QuantizeLinear, and where none
# follows (the logarithm of a mel spectrogram) it leaves the product in float, though it has a kernel on
# integers that gives floats. Through Max and Min it does not look, and they give the same values.

_PRODUCTS = frozenset({"MatMul", "Gemm"})


def show_products(model: Any) -> None:
    """Rewrite, in place, every Relu and Clip of a product on integers whose result stays float."""
    for node in list(model.graph):
        if node.op_type in ("Relu", "Clip") and _hides_product(node):
            _rewrite(model, node)


def _hides_product(node: Any) -> bool:
    product = node.inputs[0].producer()
    if product is None or product.op_type not in _PRODUCTS:
        return False
    sources = [value.producer() for value in product.inputs[:2]]
    if any(source is None or source.op_type != "DequantizeLinear" for source in sources):
        return False
    readers = [use.node.op_type for use in node.outputs[0].uses()]
    return any(reader != "QuantizeLinear" for reader in readers)


def _rewrite(model: Any, node: Any) -> None:
    import onnx_ir as ir

    if node.op_type == "Relu":
        zero = np.zeros((), node.inputs[0].dtype.numpy())
        bounds = [add_initializer(model, zero, f"{node.outputs[0].name}_bound"), None]
    else:
        bounds = [*node.inputs[1:], None, None][:2]
    value, result = node.inputs[0], node.outputs[0]
    steps = [
        (kind, bound)
        for kind, bound in zip(("Max", "Min"), bounds, strict=True)
        if bound is not None
    ]
    for kind, bound in steps:
        clipped = ir.Node("", kind, [value, bound], name=f"{node.name}/{kind}")
        clipped.metadata_props.update(node.metadata_props)
        model.graph.insert_before(node, clipped)
        value = clipped.outputs[0]
        value.type, value.shape = result.type, result.shape
        value.name = f"{result.name}_{kind.lower()}"
    value.name, result.name = result.name, value.name
    result.replace_all_uses_with(value, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)


# Outputs that are quantized for a reader inside of the model stay what they are.
#
# ONNX Runtime moves a QuantizeLinear before what only moves values (a Transpose of the keys, before the
# product of attention), and puts a DequantizeLinear behind it. Where the value that it comes to is an
# output of the model, too, the output becomes the dequantized one, rounded and clipped (1.31: it counts
# readers inside of the model only). So the file has the pair there, beside the output.

_MOVING = frozenset({"Flatten", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})


def keep_outputs(model: Any) -> None:
    """Write such pairs, in place."""
    for node in list(model.graph):
        if node.op_type == "QuantizeLinear" and has_one_scale(node):
            first = _first_after_output(node)
            if first is not None:
                _insert_pair(model, node, first)


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


def _insert_pair(model: Any, quantize: Any, reader: Any) -> None:
    import onnx_ir as ir

    value = reader.inputs[0]
    for kind in ("QuantizeLinear", "DequantizeLinear"):
        name = f"{quantize.name}/{kind}"
        node = ir.Node("", kind, [value, *quantize.inputs[1:]], name=name)
        node.metadata_props.update(quantize.metadata_props)
        value = node.outputs[0]
        value.name, value.shape = f"{name}_0", reader.inputs[0].shape
        value.type = quantize.outputs[0].type if kind == "QuantizeLinear" else reader.inputs[0].type
        model.graph.insert_before(reader, node)
    reader.replace_input_with(0, value)


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
    found = [node for node in model.graph if node.op_type == "Resize" and _is_bicubic(node)]
    for node in found:
        _write(model, node)
    if found:
        drop_unused(model)


def _is_bicubic(node: Any) -> bool:
    named = {name: each.value for name, each in node.attributes.items()}
    if named.get("mode") != "cubic" or named.get("cubic_coeff_a", _CUBIC) != _CUBIC:
        return False
    if named.get("coordinate_transformation_mode", "half_pixel") not in _MODES or "axes" in named:
        return False
    return not named.get("antialias") and not named.get("exclude_outside")


def _write(model: Any, node: Any) -> None:
    import onnx_ir as ir

    source, rest = node.inputs[0], list(node.inputs[1:])
    shape, sizes = source.shape, rest[_SIZES - 1] if len(rest) == _SIZES else None
    if sizes is None or sizes.const_value is None or any(each is not None for each in rest[:2]):
        return
    if shape is None or len(shape) != 4 or not all(isinstance(size, int) for size in shape):
        return
    old, new = [int(size) for size in shape], sizes.const_value.numpy().tolist()
    if old[:2] != new[:2] or sum(old[2:]) > _MOST or source.dtype != ir.DataType.FLOAT:
        return
    mode = node.attributes.get("coordinate_transformation_mode")
    corners = _MODES["half_pixel" if mode is None else mode.as_string()]
    columns = _constant(model, node, _matrix(old[3], new[3], corners).T)
    rows = _constant(model, node, _matrix(old[2], new[2], corners))
    first = ir.Node("", "MatMul", [source, columns], name=f"{node.name}/columns")
    first.outputs[0].name, first.outputs[0].type = first.name, source.type
    first.outputs[0].shape = ir.Shape([*old[:3], new[3]])
    model.graph.insert_before(node, first)
    second = ir.Node("", "MatMul", [rows, first.outputs[0]], name=f"{node.name}/rows")
    replace_node(model, node, second, "resized")


def _constant(model: Any, node: Any, matrix: np.ndarray[Any, Any]) -> Any:
    return add_initializer(model, np.ascontiguousarray(matrix), f"{node.name}/matrix")


def _matrix(old: int, new: int, corners: bool) -> np.ndarray[Any, Any]:
    """What makes ``new`` values of ``old`` ones: ``[new, old]``.

    >>> _matrix(2, 2, corners=False).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    made = overload("upsample_bicubic2d")(torch.eye(old)[None, None], [new, old], corners)
    matrix: np.ndarray[Any, Any] = made[0, 0].numpy()
    return matrix
