"""The bias of a quantized product as 32-bit integers, of the scale input × weight, dequantized.

ONNX Runtime runs a Gemm between dequantized operands on integers when its result is quantized (then it
quantizes a float bias itself), or when its bias is integers of the scale input × weight. A MatMul with a
following addition of a bias becomes such a Gemm where it knows the shapes. A Gemm without a bias is
written as a MatMul, which it runs on integers with a float result. The bias that is an operand (of a Gemm, of
a convolution) is stored so whatever becomes of the result. A Relu behind a Gemm or MatMul with a float result
keeps it in float, for what a later quantization might make needless: it is written as Max(x, 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from backquant.backend_config import DTypeConfig
from backquant.deploy.onnx.initializers import add_initializer, replace_node
from backquant.deploy.onnx.provenance import ORIGIN

_LIMIT = 2**31 - 1
_PRODUCTS = ("Gemm", "MatMul", "Conv")


def store_integer_biases(model: Any) -> None:
    """Rewrite, in place, products on dequantized operands: biases that are operands, and those that are added
    behind a MatMul whose result nothing quantizes (before a quantized one, ONNX Runtime does that itself)."""
    for node in list(model.graph):
        if node.op_type not in _PRODUCTS or not _is_quantized(node):
            continue
        adds_bias = _bias_reader(node)
        if adds_bias is not None and _takes_bias(node):
            if adds_bias[0] is node or not _is_requantized(adds_bias[0]):
                _store_bias(model, node, *adds_bias)
            if node.op_type != "Conv" and not _is_requantized(adds_bias[0]):
                _relu_as_max(model, adds_bias[0].outputs[0])
        elif node.op_type != "Conv" and not _is_requantized(node):
            _relu_as_max(model, node.outputs[0])
            if _is_flat(node):
                _without_bias(model, node)


def store_described_biases(model: Any, described: Mapping[str, DTypeConfig]) -> None:
    """Rewrite, in place, the constant biases of products on dequantized operands, of those nodes of the
    reference graph whose biases are ``described`` as integers of the scale input × weight."""
    for node in list(model.graph):
        config = described.get(node.metadata_props.get(ORIGIN, ""))
        if config is None or config.bias_scale != "input_times_weight":
            continue
        if node.op_type in (*_PRODUCTS, "ConvTranspose") and _is_quantized(node):
            adds_bias = _bias_reader(node)
            if adds_bias is not None and _takes_bias(node):
                _store_bias(model, node, *adds_bias)


def _bias_reader(node: Any) -> tuple[Any, int] | None:
    """The node that adds a bias, and the position of the bias among its inputs."""
    if node.op_type in ("Gemm", "Conv", "ConvTranspose"):
        return (node, 2) if len(node.inputs) > 2 and node.inputs[2] is not None else None
    users = [use.node for use in node.outputs[0].uses()]
    if len(users) != 1 or users[0].op_type != "Add":
        return None
    return users[0], int(users[0].inputs[0] is node.outputs[0])


def _is_quantized(node: Any) -> bool:
    sources = [value.producer() for value in node.inputs[:2]]
    if any(source is None or source.op_type != "DequantizeLinear" for source in sources):
        return False
    factors = (node.attributes.get(name) for name in ("alpha", "beta"))
    plain = all(factor is None or factor.as_float() == 1.0 for factor in factors)
    return plain and not _flag(node, "transA")


def _flag(node: Any, name: str) -> bool:
    return name in node.attributes and bool(node.attributes[name].as_int())


def _is_flat(node: Any) -> bool:
    shape = node.inputs[0].shape
    return node.op_type == "Gemm" or (shape is not None and len(shape) == 2)


def _takes_bias(node: Any) -> bool:
    """Whether it has a bias, or a constant is added to it."""
    found = _bias_reader(node)
    return found is not None and found[0].inputs[found[1]].const_value is not None


def _is_requantized(node: Any) -> bool:
    users = [use.node for use in node.outputs[0].uses()]
    if len(users) == 1 and users[0].op_type in ("Relu", "Clip"):
        users = [use.node for use in users[0].outputs[0].uses()]
    return bool(users) and all(user.op_type == "QuantizeLinear" for user in users)


def _store_bias(model: Any, product: Any, adds: Any, position: int) -> None:
    bias = adds.inputs[position]
    if bias.const_value is None or len(bias.const_value.shape) != 1:
        return
    made = _integers(model, product, bias.const_value.numpy(), str(bias.name))
    if made is not None:
        adds.replace_input_with(position, made)


def _relu_as_max(model: Any, value: Any) -> None:
    """The Relu that alone reads ``value`` as a maximum."""
    import onnx_ir as ir

    readers = [use.node for use in value.uses()]
    if len(readers) != 1 or readers[0].op_type != "Relu":
        return
    relu = readers[0]
    zero = add_initializer(model, np.array(0, np.float32), f"{relu.name}_least")
    replace_node(model, relu, ir.Node("", "Max", [value, zero], name=relu.name), "max")


def _without_bias(model: Any, product: Any) -> None:
    """A Gemm with a bias of zeros: a following addition of another value is not taken for its bias."""
    import onnx_ir as ir

    weight = product.inputs[1].producer().inputs[0]
    if weight.const_value is None or weight.shape is None:
        return
    transposed = _flag(product, "transB")
    width = int(weight.shape[0 if transposed else 1])
    bias = _integers(model, product, np.zeros(width, np.float32), f"{product.name}/no_bias")
    if bias is None:
        return
    attributes = [ir.AttrInt64("transB", int(transposed))]
    made = ir.Node("", "Gemm", [*product.inputs[:2], bias], attributes, name=f"{product.name}/zero")
    replace_node(model, product, made, "product")


def _integers(model: Any, product: Any, bias: np.ndarray[Any, Any], name: str) -> Any:
    """``bias`` as a dequantized constant of the scale input × weight; ``None`` where it does not fit."""
    import onnx_ir as ir

    scales = [value.producer().inputs[1].const_value for value in product.inputs[:2]]
    if any(scale is None for scale in scales):
        return None
    first, second = (scale.numpy().astype(np.float32) for scale in scales)
    step = first * second
    if (
        step.size > 1 and bias.size % step.size == 0
    ):  # groups of a transposed convolution share them
        step = np.tile(step, bias.size // step.size)
    scale = np.ascontiguousarray(np.broadcast_to(step, bias.shape))
    integers = np.round(bias.astype(np.float64) / scale)
    if np.abs(integers).max(initial=0) > _LIMIT:
        return None
    inputs = [
        add_initializer(model, integers.astype(np.int32), name),
        add_initializer(model, scale, f"{name}_scale"),
        add_initializer(model, np.zeros(bias.shape, np.int32), f"{name}_zero_point"),
    ]
    axis = [ir.AttrInt64("axis", 0)]
    made = ir.Node("", "DequantizeLinear", inputs, axis, name=f"{product.name}/bias")
    result = made.outputs[0]
    result.name = f"{product.outputs[0].name}_bias"
    result.type, result.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(bias.shape)
    made.metadata_props.update(product.metadata_props)
    model.graph.insert_before(product, made)
    return result
