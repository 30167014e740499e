"""The rules, as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from backquant.deploy.tensorrt.qparam_rules import (
    FLOAT8,
    INT4,
    INT32,
    QPARAMS,
    is_blocked,
    nodes_of,
    type_name,
)
from backquant.deploy.tensorrt.view import (
    CUSTOM_QDQ,
    DECONVOLUTION,
    EXPLICIT,
    JOINED,
    MOVING,
    ONNX_QUANTIZE,
    OPERATORS,
    PARSER_BIAS,
    POOLING,
    SCHEMES,
    WEIGHTED,
    GraphView,
    Hit,
    Rule,
)

if TYPE_CHECKING:
    from onnx import NodeProto

# What a builder of TensorRT was seen to refuse, though its documentation does not say so.
#
# Seen with TensorRT 8.6.0 on an NVIDIA H200, by conformance's cases of the description ``tensorrt``; later
# versions may build them.

_POOLS = ("AveragePool", "MaxPool")
_SPATIAL_3D = 3


def _pool_3d(view: GraphView) -> Iterator[Hit]:
    for kind in _POOLS:
        for node in view.of_type(kind):
            sizes = next((list(a.ints) for a in node.attribute if a.name == "kernel_shape"), [])
            if len(sizes) == _SPATIAL_3D and view.is_dequantized(node.input[0]):
                what = f"{kind} over three axes may have no INT8 kernel"
                yield Hit(
                    view.name(node), what, "float, if the builder finds no kernel", "quantized"
                )


def _transposed(view: GraphView) -> Iterator[Hit]:
    for node in view.of_type("ConvTranspose"):
        if view.is_quantized(node):
            what = "a transposed convolution on integers may not build"
            yield Hit(view.name(node), what, "float, if the builder fails", "quantized")


BUILT = (
    Rule(
        "pool-3d",
        "A quantized pool over three axes may not build",
        "advice",
        POOLING,
        "TensorRT 8.6.0: “All of the candidates were removed”",
        _pool_3d,
    ),
    Rule(
        "transposed",
        "A quantized transposed convolution may not build",
        "advice",
        DECONVOLUTION,
        "TensorRT 8.6.0: “Assertion engine failed” (the float one builds)",
        _transposed,
    ),
)


# Rules about single formats and operators: INT4 blocks, FP8, INT32 biases, operators that are refused.

REJECTED = frozenset(
    {
        "ConvInteger",
        "DynamicQuantizeLinear",
        "MatMulInteger",
        "QLinearConv",
        "QLinearMatMul",
    }
)
_BLOCKS = (64, 128)
_WITH_BIAS = ("Conv", "ConvTranspose", "Gemm")


def _float_bias(view: GraphView) -> Iterator[Hit]:
    for node in view.of_type("DequantizeLinear"):
        if view.element_type(view.input(node, 0)) == INT32:
            what = "an INT32 bias is dequantized"
            yield Hit(view.name(node), what, "the bias as float constants", "INT32")
    for node in view.of_type(*_WITH_BIAS):
        maker = view.producer(view.input(node, 2))
        if maker is None or maker.op_type != "DequantizeLinear":
            continue
        made = view.element_type(view.input(maker, 0))
        if made != INT32:  # that one is named above
            what = "the bias is quantized"
            yield Hit(view.name(node), what, "the bias as float constants", type_name(made))


def _int4_blocks(view: GraphView) -> Iterator[Hit]:
    for node in nodes_of(view):
        if INT4 not in (view.element_type(view.input(node, 0)), _made(view, node)):
            continue
        name, size = view.name(node), int(view.attribute(node, "block_size", 0))
        if not view.depends_on_constants(view.input(node, 0)):
            yield Hit(name, "INT4 is for weights only", "a constant", view.input(node, 0))
        if size not in _BLOCKS:
            yield Hit(name, "the size of INT4 blocks", "64 or 128", str(size or "no blocks"))
        yield from _block_axis(view, node, name)
        if view.input(node, 2):
            yield Hit(name, "INT4 blocks have no zero point", "none", view.input(node, 2))


def _made(view: GraphView, node: NodeProto) -> int:
    return view.element_type(node.output[0]) if node.op_type == "QuantizeLinear" else 0


def _block_axis(view: GraphView, node: NodeProto, name: str) -> Iterator[Hit]:
    shape = view.shape(view.input(node, 0))
    if shape is None or not is_blocked(view, node):
        return
    axis = view.attribute(node, "axis", 1)
    if axis % max(len(shape), 1) < len(shape) - 2:
        what = "INT4 blocks lie on one of the last two axes"
        yield Hit(name, what, f"axis {len(shape) - 2} or {len(shape) - 1}", str(axis))


def _fp8_range(view: GraphView) -> Iterator[Hit]:
    for node in nodes_of(view):
        if node.op_type == "QuantizeLinear":
            saturates = view.attribute(node, "saturate", 1)
            if _made(view, node) == FLOAT8 and not saturates:
                what = "values beyond ±448 become NaN"
                yield Hit(view.name(node), what, "saturate=1", "saturate=0")
            continue
        source = view.input(node, 0)
        tensor = view.constant(source)
        if tensor is None or tensor.data_type != FLOAT8:
            continue
        if np.any(np.isnan(view.array(source))):
            yield Hit(view.name(node), "FP8 weights hold NaN", "within ±448", source)


def _rejected(view: GraphView) -> Iterator[Hit]:
    for node in view.of_type(*REJECTED):
        yield Hit(
            view.name(node),
            f"TensorRT has no {node.op_type}",
            "QuantizeLinear and DequantizeLinear around the float operator",
            node.op_type,
        )


FORMATS = (
    Rule(
        "float-bias",
        "Biases are float: no DequantizeLinear of INT32, no quantized bias",
        "error",
        PARSER_BIAS,
        "DequantizeLinear runs in INT8, FP8, FP4 or INT4 only (messages of TensorRT 10)",
        _float_bias,
    ),
    Rule(
        "int4-blocks",
        "INT4 is for weights: blocks of 64 or 128 on one of the last two axes, no zero point",
        "error",
        SCHEMES,
        "INT4 block quantization",
        _int4_blocks,
    ),
    Rule(
        "fp8-range",
        "FP8 E4M3 is clipped at ±448: QuantizeLinear saturates, weights hold no NaN",
        "error",
        f"{SCHEMES} {ONNX_QUANTIZE}",
        "the range of FP8; the attribute saturate",
        _fp8_range,
    ),
    Rule(
        "rejected-operator",
        "No DynamicQuantizeLinear, QLinearConv, QLinearMatMul, MatMulInteger, ConvInteger",
        "error",
        OPERATORS,
        "the support matrix of the ONNX parser",
        _rejected,
    ),
)


# Rules about where quantize and dequantize nodes stand.
#
# In these rules a weighted operator is a convolution, a transposed one, or a matrix product; it counts as
# quantized when it reads a dequantized value.

POOLS = ("AveragePool", "GlobalAveragePool")
_INTEGERS = (2, 3, 17, 21, 22, 23)  # what a quantized tensor may be made of
_CONVERSIONS = ("QuantizeLinear", "DequantizeLinear")


def _weight_dequantize(view: GraphView) -> Iterator[Hit]:
    for node in view.of_type(*WEIGHTED):
        for index in (0, 1):
            name = view.input(node, index)
            made = view.element_type(name)
            if made in _INTEGERS:
                what = f"{node.op_type} reads quantized values as they are"
                yield Hit(view.name(node), what, "a DequantizeLinear between", type_name(made))


def _weight_direct(view: GraphView) -> Iterator[Hit]:
    for node in view.of_type("DequantizeLinear"):
        if not view.depends_on_constants(view.input(node, 0)):
            continue
        for reader in view.readers(node.output[0]):
            behind = view.readers(reader.output[0]) if reader.output else []
            between = reader.op_type in MOVING or reader.op_type == "Cast"
            if between and any(user.op_type in WEIGHTED for user in behind):
                what = f"{reader.op_type} between a weight's DequantizeLinear and its operator"
                yield Hit(view.name(node), what, "none between", reader.op_type)


def _is_weight_only(view: GraphView, node: NodeProto) -> bool:
    maker = view.producer(view.input(node, 1))
    return (
        maker is not None
        and maker.op_type == "DequantizeLinear"
        and view.element_type(view.input(maker, 0)) == INT4
    )


def _inputs_quantized(view: GraphView) -> Iterator[Hit]:
    for node in view.of_type(*WEIGHTED):
        if not view.is_quantized(node) or _is_weight_only(view, node):
            continue
        for index in (0, 1):
            name = view.input(node, index)
            if not view.is_dequantized(name) and view.element_type(name) not in _INTEGERS:
                role = "weight" if view.constant(name) is not None else "input"
                what = f"the {role} of a quantized {node.op_type} is float"
                yield Hit(view.name(node), what, "quantized and dequantized", name)


def _skip_quantized(view: GraphView) -> Iterator[Hit]:
    for node in view.of_type("Add", "Sum"):
        values = [name for name in node.input if view.constant(name) is None]
        computed = [name for name in values if view.kernel_of(name) is not None]
        if len(values) != 2 or not computed:
            continue
        if not any(view.is_dequantized(name) for name in values):
            skip = next((name for name in values if name not in computed), values[1])
            what = "the skip input of a residual addition is float"
            yield Hit(view.name(node), what, "quantized and dequantized", skip)


def _pool_quantized(view: GraphView) -> Iterator[Hit]:
    for node in view.of_type(*POOLS):
        reads = view.is_dequantized(view.input(node, 0))
        gives = node.output[0] in view.quantized_next
        if reads != gives:
            side = "output" if reads else "input"
            what = f"{node.op_type} is quantized on one side only: its {side} is float"
            yield Hit(view.name(node), what, "input and output quantized", f"a float {side}")


def _add_quantized(view: GraphView) -> Iterator[Hit]:
    for node in view.of_type("Add"):
        values = [name for name in node.input if view.constant(name) is None]
        if len(values) != 2 or any(view.kernel_of(name) is not None for name in values):
            continue
        reads = [view.is_dequantized(name) for name in values]
        if any(reads) and not all(reads):
            float_one = values[reads.index(False)]
            what = "an addition reads one quantized and one float value"
            yield Hit(view.name(node), what, "both inputs quantized", float_one)


def _scale_behind(view: GraphView, value: str) -> float | None:
    """The scale of the DequantizeLinear that gives ``value``, through operators that move values."""
    node = view.dequantize_behind(value)
    return None if node is None else _scale(view, node)


def _scale(view: GraphView, node: NodeProto) -> float | None:
    name = view.input(node, 1)
    tensor = view.constant(name)
    if tensor is None or any(dim != 1 for dim in tensor.dims):
        return None
    return float(view.array(name).flat[0])


def _max_pool(view: GraphView) -> Iterator[Hit]:
    for node in view.of_type("MaxPool"):
        before = _scale_behind(view, view.input(node, 0))
        for reader in view.readers(node.output[0]):
            after = _scale(view, reader) if reader.op_type == "QuantizeLinear" else None
            if before is not None and after is not None and before != after:
                what = "MaxPool between two different scales"
                yield Hit(view.name(node), what, f"{before:.6g}", f"{after:.6g}")


def _concat_scales(view: GraphView) -> Iterator[Hit]:
    for node in view.of_type("Concat"):
        found = [_scale_behind(view, name) for name in node.input]
        scales = {scale for scale in found if scale is not None}
        if scales and None in found:
            what = "a concatenation reads quantized and float values"
            yield Hit(view.name(node), what, "all quantized", node.input[found.index(None)])
        elif len(scales) > 1:
            shown = ", ".join(f"{scale:.6g}" for scale in sorted(scales))
            yield Hit(view.name(node), "the inputs of a concatenation differ", "one scale", shown)


def _extra_pair(view: GraphView) -> Iterator[Hit]:
    for node in view.of_type("DequantizeLinear"):
        quantize = view.producer(view.input(node, 0))
        if quantize is None or quantize.op_type != "QuantizeLinear":
            continue
        maker = view.kernel_of(view.input(quantize, 0))
        if maker is None or len(view.readers(view.input(quantize, 0))) > 1:
            continue
        readers = [r for r in view.readers(quantize.output[0]) if r.op_type == "DequantizeLinear"]
        users = [user for reader in readers for user in view.readers(reader.output[0])]
        if len(users) == 1 and _joins(view, users[0], node.output[0]):
            what = f"a pair between {maker.op_type} and {users[0].op_type} splits their kernel"
            yield Hit(view.name(quantize), what, "no pair", users[0].op_type)


def _joins(view: GraphView, user: Any, value: str) -> bool:
    """Whether ``user`` could run in the kernel that computes ``value``."""
    if user.op_type in JOINED:
        return True
    others = [name for name in user.input if name != value and view.constant(name) is None]
    return user.op_type == "Add" and all(map(view.is_dequantized, others))


def _weight_shape(view: GraphView, node: NodeProto) -> tuple[int | None, ...] | None:
    value = view.input(node, 1)
    for _ in _CONVERSIONS:
        maker = view.producer(value)
        if maker is None or maker.op_type not in _CONVERSIONS:
            break
        value = view.input(maker, 0)
    return view.shape(value)


def _stem(view: GraphView) -> Iterator[Hit]:
    for node in view.of_type("Conv"):
        shape = _weight_shape(view, node)
        if shape is None or shape[1:] != (3, 7, 7) or not view.is_quantized(node):
            continue
        value, steps = node.output[0], ["Relu", "MaxPool"]
        while steps:
            readers = [r for r in view.readers(value) if r.op_type not in _CONVERSIONS]
            if not readers:
                readers = [u for r in view.readers(value) for u in view.readers(r.output[0])]
            if len(readers) != 1 or not readers[0].output:
                break
            if readers[0].op_type == steps[0]:
                steps.pop(0)
            elif readers[0].op_type not in _CONVERSIONS:
                break
            value = readers[0].output[0]
        if not steps:
            what = "a 7×7 convolution of 3 channels with Relu and MaxPool may have no INT8 kernel"
            yield Hit(view.name(node), what, "float, if the builder finds no kernel", "quantized")


PLACEMENT = (
    Rule(
        "weight-dequantize",
        "Between quantized values and a weighted operator stands a DequantizeLinear",
        "error",
        EXPLICIT,
        "Quantized Weights: the layer is required between weights and linear operator",
        _weight_dequantize,
    ),
    Rule(
        "weight-direct",
        "A weight's DequantizeLinear stands directly before its operator",
        "advice",
        EXPLICIT,
        "Quantized Weights",
        _weight_direct,
    ),
    Rule(
        "inputs-quantized",
        "All inputs of a quantized convolution or matrix product are quantized",
        "advice",
        EXPLICIT,
        "Q/DQ placement: all inputs of weighted operations (INT4 weights alone are excepted)",
        _inputs_quantized,
    ),
    Rule(
        "skip-quantized",
        "The skip input of a residual addition is quantized",
        "advice",
        CUSTOM_QDQ,
        "otherwise the joined convolution gives floats",
        _skip_quantized,
    ),
    Rule(
        "pool-quantized",
        "An average pool is quantized on both sides, or on none",
        "advice",
        EXPLICIT,
        "a quantizable layer joins with the DequantizeLinear before and the QuantizeLinear after",
        _pool_quantized,
    ),
    Rule(
        "add-quantized",
        "Both inputs of an addition are quantized, or none",
        "advice",
        EXPLICIT,
        "an addition joins with the DequantizeLinear of its inputs",
        _add_quantized,
    ),
    Rule(
        "max-pool-scale",
        "MaxPool has the same scale on both sides, or no pair after it",
        "advice",
        EXPLICIT,
        "Q/DQ nodes move past layers that commute with them; scales are compared",
        _max_pool,
    ),
    Rule(
        "concat-scales",
        "The inputs of a concatenation have one scale",
        "advice",
        EXPLICIT,
        "scales are compared for equality when Q nodes move (inferred for concatenation)",
        _concat_scales,
    ),
    Rule(
        "extra-pair",
        "No pair between a weighted operator and what is computed in its kernel",
        "advice",
        EXPLICIT,
        "a pair between convolution and addition, batch norm or ReLU separates their kernels",
        _extra_pair,
    ),
    Rule(
        "stem",
        "A quantized 7×7 convolution of 3 channels with Relu and MaxPool may not build",
        "advice",
        EXPLICIT,
        "third-party log of TensorRT 10.16: “Could not find any implementation”",
        _stem,
    ),
)

#: Every rule, in the order of the table in docs/deploy-tensorrt.md.
RULES: tuple[Rule, ...] = (*QPARAMS, *FORMATS, *PLACEMENT, *BUILT)
