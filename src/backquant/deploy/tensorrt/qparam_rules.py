"""Rules about scales, zero points, types and axes of QuantizeLinear and DequantizeLinear."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from backquant.deploy.tensorrt.view import (
    EXPLICIT,
    ONNX_QUANTIZE,
    QUANTIZE,
    SCHEMES,
    GraphView,
    Hit,
    Rule,
)

if TYPE_CHECKING:
    from onnx import NodeProto

FLOAT, INT8, INT32, FLOAT16, BFLOAT16, FLOAT8, INT4, FLOAT4 = 1, 3, 6, 10, 16, 17, 22, 23
_SIGNED = (INT8, FLOAT8, INT4, FLOAT4)
_SCALES = (FLOAT, FLOAT16, BFLOAT16)
_FIRST_OPSET = {FLOAT8: 19, INT4: 21, FLOAT4: 23}


def type_name(element_type: int) -> str:
    """``INT8`` for 3, as ONNX names it.

    >>> type_name(3)
    'INT8'
    """
    from onnx import TensorProto

    return str(TensorProto.DataType.Name(element_type)) if element_type else "unknown"


def nodes_of(view: GraphView) -> Iterator[Any]:
    """The quantize and dequantize nodes."""
    return view.of_type("QuantizeLinear", "DequantizeLinear")


def is_blocked(view: GraphView, node: NodeProto) -> bool:
    """Whether one scale serves a block of values."""
    return bool(view.attribute(node, "block_size", 0))


def _quantized_type(view: GraphView, node: NodeProto) -> int:
    quantizes = node.op_type == "QuantizeLinear"
    return view.element_type(node.output[0] if quantizes else view.input(node, 0))


def _zero_point(view: GraphView) -> Iterator[Hit]:
    for node in nodes_of(view):
        name = view.input(node, 2)
        if not name:
            continue
        if view.constant(name) is None:
            yield Hit(view.name(node), "the zero point is computed", "a constant 0", name)
        elif view.element_type(name) != INT32 and np.any(view.array(name) != 0):
            found = view.array(name)
            worst = found.flat[np.argmax(found != 0)]
            yield Hit(view.name(node), "the zero point is not 0", "0", f"{worst:g}")


def _signed(view: GraphView) -> Iterator[Hit]:
    for node in nodes_of(view):
        made = _quantized_type(view, node)
        if made and made != INT32 and made not in _SIGNED:
            yield Hit(
                view.name(node),
                f"{node.op_type} of {type_name(made)}",
                "INT8, FLOAT8E4M3FN, INT4 or FLOAT4E2M1",
                type_name(made),
            )


def _scale_constant(view: GraphView) -> Iterator[Hit]:
    for node in nodes_of(view):
        name = view.input(node, 1)
        if view.constant(name) is None and not is_blocked(view, node):
            yield Hit(view.name(node), "the scale is computed", "a constant", name or "none")


def _scale_positive(view: GraphView) -> Iterator[Hit]:
    for node in nodes_of(view):
        name = view.input(node, 1)
        if view.constant(name) is None:
            continue
        scale = view.array(name)
        bad = ~(np.isfinite(scale) & (scale > 0))
        if np.any(bad):
            worst = scale.flat[np.argmax(bad)]
            what = "a scale is not positive and finite"
            yield Hit(view.name(node), what, "above 0", f"{worst:g}")


def _scale_type(view: GraphView) -> Iterator[Hit]:
    for node in nodes_of(view):
        made = view.element_type(view.input(node, 1))
        if made and made not in _SCALES:
            what = f"the scale is {type_name(made)}"
            yield Hit(view.name(node), what, "FLOAT, FLOAT16 or BFLOAT16", type_name(made))


def _zero_point_shape(view: GraphView) -> Iterator[Hit]:
    for node in nodes_of(view):
        scale, zero = view.constant(view.input(node, 1)), view.constant(view.input(node, 2))
        if scale is None or zero is None:
            continue
        if _size(scale) != _size(zero):
            what = "scale and zero point differ in size"
            yield Hit(view.name(node), what, f"{_size(scale)}", f"{_size(zero)}")


def _size(tensor: Any) -> int:
    return int(np.prod(tensor.dims, dtype=np.int64))


def _channels(view: GraphView, node: NodeProto) -> int:
    """The number of scales where there is one for each channel; else 0."""
    shape = view.shape(view.input(node, 1))
    if shape is None or len(shape) != 1 or shape[0] in (None, 1) or is_blocked(view, node):
        return 0
    return shape[0] or 0


def _axis_explicit(view: GraphView) -> Iterator[Hit]:
    for node in nodes_of(view):
        if _channels(view, node) and view.attribute(node, "axis") is None:
            yield Hit(view.name(node), "scales per channel without an axis", "axis=…", "none")


def _axis_length(view: GraphView) -> Iterator[Hit]:
    for node in nodes_of(view):
        channels, shape = _channels(view, node), view.shape(view.input(node, 0))
        axis = view.attribute(node, "axis", 1)
        if not channels or shape is None:
            continue
        if not -len(shape) <= axis < len(shape):
            yield Hit(view.name(node), "the axis is out of range", f"below {len(shape)}", f"{axis}")
        elif shape[axis] not in (None, channels):
            what = f"one scale for each channel of axis {axis}"
            yield Hit(view.name(node), what, f"{shape[axis]} scales", f"{channels}")


def _scale_rank(view: GraphView) -> Iterator[Hit]:
    for node in nodes_of(view):
        shape = view.shape(view.input(node, 1))
        if shape is not None and len(shape) > 1 and not is_blocked(view, node):
            what = "scales that are neither one nor one per channel"
            yield Hit(view.name(node), what, "no or one dimension", f"{len(shape)} dimensions")


def _per_tensor(view: GraphView) -> Iterator[Hit]:
    for node in nodes_of(view):
        channels = _channels(view, node)
        if channels and not view.depends_on_constants(view.input(node, 0)):
            what = "an activation has one scale per channel"
            yield Hit(view.name(node), what, "one scale", f"{channels}")


def _opset(view: GraphView) -> Iterator[Hit]:
    for node in nodes_of(view):
        needed, reason = 10, "QuantizeLinear and DequantizeLinear"
        if _channels(view, node):
            needed, reason = 13, "scales per channel"
        made = _quantized_type(view, node)
        if _FIRST_OPSET.get(made, 0) > needed:
            needed, reason = _FIRST_OPSET[made], type_name(made)
        if is_blocked(view, node) and needed < 21:
            needed, reason = 21, "scales per block"
        if view.opset < needed:
            what = f"the operator set is older than {reason}"
            yield Hit(view.name(node), what, f"opset {needed}", f"{view.opset}")


QPARAMS = (
    Rule(
        "zero-point",
        "Zero points are absent, or constants of zeros",
        "error",
        QUANTIZE,
        "the zero point must only contain zeros; the parser asserts shiftIsAllZeros",
        _zero_point,
    ),
    Rule(
        "signed",
        "Quantized values are signed: INT8, FP8 E4M3, INT4 or FP4 E2M1, never UINT8",
        "error",
        QUANTIZE,
        "the types that the layer gives; UINT8 is for DLA only",
        _signed,
    ),
    Rule(
        "scale-constant",
        "Scales are constants of the file",
        "error",
        QUANTIZE,
        "the scale is a build-time constant",
        _scale_constant,
    ),
    Rule(
        "scale-positive",
        "Scales are finite and above zero",
        "error",
        QUANTIZE,
        "the scale's coefficients must be positive",
        _scale_positive,
    ),
    Rule(
        "scale-type",
        "Scales are FP32, FP16 or BF16",
        "error",
        QUANTIZE,
        "the types of the scale",
        _scale_type,
    ),
    Rule(
        "zero-point-shape",
        "A zero point is as long as its scale",
        "error",
        QUANTIZE,
        "the zero point has the scale's dimensions",
        _zero_point_shape,
    ),
    Rule(
        "scale-rank",
        "A scale is one number, one per channel, or one per block",
        "error",
        SCHEMES,
        "per tensor, per channel and block quantization",
        _scale_rank,
    ),
    Rule(
        "axis-explicit",
        "Scales per channel name their axis",
        "error",
        EXPLICIT,
        "the axis attribute is required for quantization per channel (opset 13)",
        _axis_explicit,
    ),
    Rule(
        "axis-length",
        "There is one scale for each channel of the axis",
        "error",
        QUANTIZE,
        "the scale has the length of the axis' dimension",
        _axis_length,
    ),
    Rule(
        "activation-per-tensor",
        "Activations have one scale",
        "error",
        SCHEMES,
        "scales per channel are for weights",
        _per_tensor,
    ),
    Rule(
        "opset",
        "The operator set has the form: 13 per channel, 19 FP8, 21 INT4 and blocks, 23 FP4",
        "error",
        ONNX_QUANTIZE,
        "the versions of QuantizeLinear",
        _opset,
    ),
)
