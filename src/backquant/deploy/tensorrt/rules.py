"""The rules: what TensorRT documents, and what a builder was seen to refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

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
    QUANTIZE,
    SCHEMES,
    WEIGHTED,
    GraphView,
    Hits,
    Node,
    Rule,
    Severity,
)

_Check = Callable[[GraphView, Node], Hits]

#: Every rule, in the order of the table in docs/deploy-tensorrt.md.
RULES: list[Rule] = []


def _rule(name: str, severity: Severity, source: str, *kinds: str) -> Callable[[_Check], _Check]:
    """A rule about operators of these kinds, whose check's docstring is its title and, behind a bar, its
    basis."""

    def register(check: _Check) -> _Check:
        said = " ".join((check.__doc__ or "").split())
        title, _, basis = said.partition(" | ")
        RULES.append(Rule(name, title, severity, source, basis, kinds, check))
        return check

    return register


# Rules about scales, zero points, types and axes.

_QDQ = ("QuantizeLinear", "DequantizeLinear")
FLOAT8 = "FLOAT8E4M3FN"
_SIGNED = ("INT8", FLOAT8, "INT4", "FLOAT4E2M1")
_FIRST_OPSET = {FLOAT8: 19, "INT4": 21, "FLOAT4E2M1": 23}


def _quantized_type(view: GraphView, node: Node) -> str:
    return view.element_type(node.outputs[0] if node.kind == "QuantizeLinear" else node.input(0))


def _channels(view: GraphView, node: Node) -> int:
    """The number of scales where there is one for each channel; else 0."""
    shape = view.shape(node.input(1))
    if shape is None or len(shape) != 1 or shape[0] in (None, 1) or node.is_blocked:
        return 0
    return shape[0] or 0


@_rule("zero-point", "error", QUANTIZE, *_QDQ)
def _zero_point(view: GraphView, node: Node) -> Hits:
    """Zero points are absent, or constants of zeros | the zero point must only contain zeros; the parser
    asserts shiftIsAllZeros"""
    name = node.input(2)
    if name and view.constant(name) is None:
        yield "the zero point is computed", "a constant 0", name
    elif name and view.element_type(name) != "INT32" and np.any(view.array(name) != 0):
        found = view.array(name)
        yield "the zero point is not 0", "0", f"{found.flat[np.argmax(found != 0)]:g}"


@_rule("signed", "error", QUANTIZE, *_QDQ)
def _signed(view: GraphView, node: Node) -> Hits:
    """Quantized values are signed: INT8, FP8 E4M3, INT4 or FP4 E2M1, never UINT8 | the types that the layer
    gives; UINT8 is for DLA only"""
    made = _quantized_type(view, node)
    if made and made != "INT32" and made not in _SIGNED:
        yield f"{node.kind} of {made}", "INT8, FLOAT8E4M3FN, INT4 or FLOAT4E2M1", made


@_rule("scale-constant", "error", QUANTIZE, *_QDQ)
def _scale_constant(view: GraphView, node: Node) -> Hits:
    """Scales are constants of the file | the scale is a build-time constant"""
    if view.constant(node.input(1)) is None and not node.is_blocked:
        yield "the scale is computed", "a constant", node.input(1) or "none"


@_rule("scale-positive", "error", QUANTIZE, *_QDQ)
def _scale_positive(view: GraphView, node: Node) -> Hits:
    """Scales are finite and above zero | the scale's coefficients must be positive"""
    if view.constant(node.input(1)) is None:
        return
    scale = view.array(node.input(1))
    bad = ~(np.isfinite(scale) & (scale > 0))
    if np.any(bad):
        yield "a scale is not positive and finite", "above 0", f"{scale.flat[np.argmax(bad)]:g}"


@_rule("scale-type", "error", QUANTIZE, *_QDQ)
def _scale_type(view: GraphView, node: Node) -> Hits:
    """Scales are FP32, FP16 or BF16 | the types of the scale"""
    made = view.element_type(node.input(1))
    if made not in ("", "FLOAT", "FLOAT16", "BFLOAT16"):
        yield f"the scale is {made}", "FLOAT, FLOAT16 or BFLOAT16", made


@_rule("zero-point-shape", "error", QUANTIZE, *_QDQ)
def _zero_point_shape(view: GraphView, node: Node) -> Hits:
    """A zero point is as long as its scale | the zero point has the scale's dimensions"""
    held = [view.constant(node.input(index)) for index in (1, 2)]
    if None not in held:
        one, other = (int(np.prod(tensor.dims, dtype=np.int64)) for tensor in held)  # type: ignore[union-attr]
        if one != other:
            yield "scale and zero point differ in size", f"{one}", f"{other}"


@_rule("scale-rank", "error", SCHEMES, *_QDQ)
def _scale_rank(view: GraphView, node: Node) -> Hits:
    """A scale is one number, one per channel, or one per block | per tensor, per channel and block
    quantization"""
    shape = view.shape(node.input(1))
    if shape is not None and len(shape) > 1 and not node.is_blocked:
        what = "scales that are neither one nor one per channel"
        yield what, "no or one dimension", f"{len(shape)} dimensions"


@_rule("axis-explicit", "error", EXPLICIT, *_QDQ)
def _axis_explicit(view: GraphView, node: Node) -> Hits:
    """Scales per channel name their axis | the axis attribute is required for quantization per channel
    (opset 13)"""
    if _channels(view, node) and node.attribute("axis") is None:
        yield "scales per channel without an axis", "axis=…", "none"


@_rule("axis-length", "error", QUANTIZE, *_QDQ)
def _axis_length(view: GraphView, node: Node) -> Hits:
    """There is one scale for each channel of the axis | the scale has the length of the axis' dimension"""
    channels, shape = _channels(view, node), view.shape(node.input(0))
    axis = node.attribute("axis", 1)
    if not channels or shape is None:
        return
    if not -len(shape) <= axis < len(shape):
        yield "the axis is out of range", f"below {len(shape)}", f"{axis}"
    elif shape[axis] not in (None, channels):
        what = f"one scale for each channel of axis {axis}"
        yield what, f"{shape[axis]} scales", f"{channels}"


@_rule("activation-per-tensor", "error", SCHEMES, *_QDQ)
def _per_tensor(view: GraphView, node: Node) -> Hits:
    """Activations have one scale | scales per channel are for weights"""
    channels = _channels(view, node)
    if channels and not view.depends_on_constants(node.input(0)):
        yield "an activation has one scale per channel", "one scale", f"{channels}"


@_rule("opset", "error", ONNX_QUANTIZE, *_QDQ)
def _opset(view: GraphView, node: Node) -> Hits:
    """The operator set has the form: 13 per channel, 19 FP8, 21 INT4 and blocks, 23 FP4 | the versions of
    QuantizeLinear"""
    needed, reason = 10, "QuantizeLinear and DequantizeLinear"
    if _channels(view, node):
        needed, reason = 13, "scales per channel"
    made = _quantized_type(view, node)
    if _FIRST_OPSET.get(made, 0) > needed:
        needed, reason = _FIRST_OPSET[made], made
    if node.is_blocked and needed < 21:
        needed, reason = 21, "scales per block"
    if view.opset < needed:
        yield f"the operator set is older than {reason}", f"opset {needed}", f"{view.opset}"


# Rules about single formats and operators: INT4 blocks, FP8, INT32 biases, operators that are refused.

_BLOCKS = (64, 128)
_REFUSED = ("ConvInteger", "DynamicQuantizeLinear", "MatMulInteger", "QLinearConv", "QLinearMatMul")


@_rule("float-bias", "error", PARSER_BIAS, "DequantizeLinear", "Conv", "ConvTranspose", "Gemm")
def _float_bias(view: GraphView, node: Node) -> Hits:
    """Biases are float: no DequantizeLinear of INT32, no quantized bias | DequantizeLinear runs in INT8, FP8,
    FP4 or INT4 only (messages of TensorRT 10)"""
    expected = "the bias as float constants"
    if node.kind == "DequantizeLinear":
        if view.element_type(node.input(0)) == "INT32":
            yield "an INT32 bias is dequantized", expected, "INT32"
        return
    maker = view.producer(node.input(2))
    if maker is not None and maker.kind == "DequantizeLinear":
        made = view.element_type(maker.input(0))
        if made != "INT32":  # that one is named above
            yield "the bias is quantized", expected, made or "unknown"


@_rule("int4-blocks", "error", SCHEMES, *_QDQ)
def _int4_blocks(view: GraphView, node: Node) -> Hits:
    """INT4 is for weights: blocks of 64 or 128 on one of the last two axes, no zero point | INT4 block
    quantization"""
    if "INT4" not in (view.element_type(node.input(0)), _quantized_type(view, node)):
        return
    size, shape = int(node.attribute("block_size", 0)), view.shape(node.input(0))
    if not view.depends_on_constants(node.input(0)):
        yield "INT4 is for weights only", "a constant", node.input(0)
    if size not in _BLOCKS:
        yield "the size of INT4 blocks", "64 or 128", str(size or "no blocks")
    if shape is not None and node.is_blocked:
        axis, last = node.attribute("axis", 1), len(shape) - 1
        if axis % max(len(shape), 1) < last - 1:
            what = "INT4 blocks lie on one of the last two axes"
            yield what, f"axis {last - 1} or {last}", str(axis)
    if node.input(2):
        yield "INT4 blocks have no zero point", "none", node.input(2)


@_rule("fp8-range", "error", f"{SCHEMES} {ONNX_QUANTIZE}", *_QDQ)
def _fp8_range(view: GraphView, node: Node) -> Hits:
    """FP8 E4M3 is clipped at ±448: QuantizeLinear saturates, weights hold no NaN | the range of FP8; the
    attribute saturate"""
    if node.kind == "QuantizeLinear":
        if _quantized_type(view, node) == FLOAT8 and not node.attribute("saturate", 1):
            yield "values beyond ±448 become NaN", "saturate=1", "saturate=0"
        return
    source = node.input(0)
    is_weight = view.constant(source) is not None and view.element_type(source) == FLOAT8
    if is_weight and np.any(np.isnan(view.array(source))):
        yield "FP8 weights hold NaN", "within ±448", source


@_rule("rejected-operator", "error", OPERATORS, *_REFUSED)
def _rejected(view: GraphView, node: Node) -> Hits:  # noqa: ARG001
    """No DynamicQuantizeLinear, QLinearConv, QLinearMatMul, MatMulInteger, ConvInteger | the support matrix
    of the ONNX parser"""
    expected = "QuantizeLinear and DequantizeLinear around the float operator"
    yield f"TensorRT has no {node.kind}", expected, node.kind


# Rules about where quantize and dequantize nodes stand.
#
# In these rules a weighted operator is a convolution, a transposed one, or a matrix product; it counts as
# quantized when it reads a dequantized value.

_QUANTIZED = (
    "UINT8",
    "INT8",
    FLOAT8,
    "UINT4",
    "INT4",
    "FLOAT4E2M1",
)  # what a tensor may be made of


@_rule("weight-dequantize", "error", EXPLICIT, *WEIGHTED)
def _weight_dequantize(view: GraphView, node: Node) -> Hits:
    """Between quantized values and a weighted operator stands a DequantizeLinear | Quantized Weights: the
    layer is required between weights and linear operator"""
    for made in map(view.element_type, node.inputs[:2]):
        if made in _QUANTIZED:
            what = f"{node.kind} reads quantized values as they are"
            yield what, "a DequantizeLinear between", made


@_rule("weight-direct", "advice", EXPLICIT, "DequantizeLinear")
def _weight_direct(view: GraphView, node: Node) -> Hits:
    """A weight's DequantizeLinear stands directly before its operator | Quantized Weights"""
    if not view.depends_on_constants(node.input(0)):
        return
    for reader in view.readers(node.outputs[0]):
        behind = view.readers(reader.outputs[0]) if reader.outputs else []
        between = reader.kind in MOVING or reader.kind == "Cast"
        if between and any(user.kind in WEIGHTED for user in behind):
            what = f"{reader.kind} between a weight's DequantizeLinear and its operator"
            yield what, "none between", reader.kind


@_rule("inputs-quantized", "advice", EXPLICIT, *WEIGHTED)
def _inputs_quantized(view: GraphView, node: Node) -> Hits:
    """All inputs of a quantized convolution or matrix product are quantized | Q/DQ placement: all inputs of
    weighted operations (INT4 weights alone are excepted)"""
    maker = view.producer(node.input(1))
    of_weight = "" if maker is None else view.element_type(maker.input(0))
    is_weight_only = maker is not None and (maker.kind, of_weight) == ("DequantizeLinear", "INT4")
    if not view.is_quantized(node) or is_weight_only:
        return
    for name in (node.input(0), node.input(1)):
        if not view.is_dequantized(name) and view.element_type(name) not in _QUANTIZED:
            role = "weight" if view.constant(name) is not None else "input"
            yield (
                f"the {role} of a quantized {node.kind} is float",
                "quantized and dequantized",
                name,
            )


def _activations(view: GraphView, node: Node) -> list[str]:
    return [name for name in node.inputs if view.constant(name) is None]


@_rule("skip-quantized", "advice", CUSTOM_QDQ, "Add", "Sum")
def _skip_quantized(view: GraphView, node: Node) -> Hits:
    """The skip input of a residual addition is quantized | otherwise the joined convolution gives floats"""
    values = _activations(view, node)
    computed = [name for name in values if view.kernel_of(name) is not None]
    if len(values) == 2 and computed and not any(map(view.is_dequantized, values)):
        skip = next((name for name in values if name not in computed), values[1])
        yield "the skip input of a residual addition is float", "quantized and dequantized", skip


@_rule("pool-quantized", "advice", EXPLICIT, "AveragePool", "GlobalAveragePool")
def _pool_quantized(view: GraphView, node: Node) -> Hits:
    """An average pool is quantized on both sides, or on none | a quantizable layer joins with the
    DequantizeLinear before and the QuantizeLinear after"""
    reads = view.is_dequantized(node.input(0))
    if reads != (node.outputs[0] in view.quantized_next):
        side = "output" if reads else "input"
        what = f"{node.kind} is quantized on one side only: its {side} is float"
        yield what, "input and output quantized", f"a float {side}"


@_rule("add-quantized", "advice", EXPLICIT, "Add")
def _add_quantized(view: GraphView, node: Node) -> Hits:
    """Both inputs of an addition are quantized, or none | an addition joins with the DequantizeLinear of its
    inputs"""
    values = _activations(view, node)
    if len(values) != 2 or any(view.kernel_of(name) is not None for name in values):
        return
    reads = list(map(view.is_dequantized, values))
    if any(reads) and not all(reads):
        what = "an addition reads one quantized and one float value"
        yield what, "both inputs quantized", values[reads.index(False)]


def _scale_behind(view: GraphView, value: str) -> float | None:
    """The scale of the DequantizeLinear that gives ``value``, through operators that move values."""
    node = view.dequantize_behind(value)
    return None if node is None else _scale(view, node)


def _scale(view: GraphView, node: Node) -> float | None:
    tensor = view.constant(node.input(1))
    if tensor is None or any(dim != 1 for dim in tensor.dims):
        return None
    return float(view.array(node.input(1)).flat[0])


@_rule("max-pool-scale", "advice", EXPLICIT, "MaxPool")
def _max_pool(view: GraphView, node: Node) -> Hits:
    """MaxPool has the same scale on both sides, or no pair after it | Q/DQ nodes move past layers that
    commute with them; scales are compared"""
    before = _scale_behind(view, node.input(0))
    for reader in view.readers(node.outputs[0]):
        after = _scale(view, reader) if reader.kind == "QuantizeLinear" else None
        if before is not None and after is not None and before != after:
            yield "MaxPool between two different scales", f"{before:.6g}", f"{after:.6g}"


@_rule("concat-scales", "advice", EXPLICIT, "Concat")
def _concat_scales(view: GraphView, node: Node) -> Hits:
    """The inputs of a concatenation have one scale | scales are compared for equality when Q nodes move
    (inferred for concatenation)"""
    found = [_scale_behind(view, name) for name in node.inputs]
    scales = {scale for scale in found if scale is not None}
    if scales and None in found:
        float_one = node.inputs[found.index(None)]
        yield "a concatenation reads quantized and float values", "all quantized", float_one
    elif len(scales) > 1:
        shown = ", ".join(f"{scale:.6g}" for scale in sorted(scales))
        yield "the inputs of a concatenation differ", "one scale", shown


@_rule("extra-pair", "advice", EXPLICIT, "QuantizeLinear")
def _extra_pair(view: GraphView, node: Node) -> Hits:
    """No pair between a weighted operator and what is computed in its kernel | a pair between convolution and
    addition, batch norm or ReLU separates their kernels"""
    maker = view.kernel_of(node.input(0))
    if maker is None or len(view.readers(node.input(0))) > 1:
        return
    back = [r for r in view.readers(node.outputs[0]) if r.kind == "DequantizeLinear"]
    users = [user for reader in back for user in view.readers(reader.outputs[0])]
    for reader in back:
        if len(users) == 1 and _joins(view, users[0], reader.outputs[0]):
            what = f"a pair between {maker.kind} and {users[0].kind} splits their kernel"
            yield what, "no pair", users[0].kind


def _joins(view: GraphView, user: Node, value: str) -> bool:
    """Whether ``user`` could run in the kernel that computes ``value``."""
    if user.kind in JOINED:
        return True
    others = [name for name in _activations(view, user) if name != value]
    return user.kind == "Add" and all(map(view.is_dequantized, others))


@_rule("stem", "advice", EXPLICIT, "Conv")
def _stem(view: GraphView, node: Node) -> Hits:
    """A quantized 7×7 convolution of 3 channels with Relu and MaxPool may not build | third-party log of
    TensorRT 10.16: “Could not find any implementation”"""
    shape = _weight_shape(view, node)
    if shape is None or shape[1:] != (3, 7, 7) or not view.is_quantized(node):
        return
    value, steps = node.outputs[0], ["Relu", "MaxPool"]
    while steps:
        readers = [r for r in view.readers(value) if r.kind not in _QDQ]
        if not readers:
            readers = [u for r in view.readers(value) for u in view.readers(r.outputs[0])]
        if len(readers) != 1 or not readers[0].outputs:
            return
        if readers[0].kind == steps[0]:
            steps.pop(0)
        elif readers[0].kind not in _QDQ:
            return
        value = readers[0].outputs[0]
    what = "a 7×7 convolution of 3 channels with Relu and MaxPool may have no INT8 kernel"
    yield what, "float, if the builder finds no kernel", "quantized"


def _weight_shape(view: GraphView, node: Node) -> tuple[int | None, ...] | None:
    value = node.input(1)
    for _ in _QDQ:
        maker = view.producer(value)
        if maker is None or maker.kind not in _QDQ:
            break
        value = maker.input(0)
    return view.shape(value)


# What a builder of TensorRT was seen to refuse, though its documentation does not say so.
#
# Seen with TensorRT 8.6.0 on an NVIDIA H200, by conformance's cases of the description ``tensorrt``; later
# versions may build them.


@_rule("pool-3d", "advice", POOLING, "AveragePool", "MaxPool")
def _pool_3d(view: GraphView, node: Node) -> Hits:
    """A quantized pool over three axes may not build | TensorRT 8.6.0: “All of the candidates were
    removed”"""
    sizes: Any = node.attribute("kernel_shape", ())
    if len(sizes) == 3 and view.is_dequantized(node.inputs[0]):
        what = f"{node.kind} over three axes may have no INT8 kernel"
        yield what, "float, if the builder finds no kernel", "quantized"


@_rule("transposed", "advice", DECONVOLUTION, "ConvTranspose")
def _transposed(view: GraphView, node: Node) -> Hits:
    """A quantized transposed convolution may not build | TensorRT 8.6.0: “Assertion engine failed” (the float
    one builds)"""
    if view.is_quantized(node):
        what = "a transposed convolution on integers may not build"
        yield what, "float, if the builder fails", "quantized"
