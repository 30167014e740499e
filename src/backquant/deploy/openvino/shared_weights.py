"""Integers of their own for each product whose result is scaled, where several read one weight.

A layer that is called several times (a recurrent cell, step by step) has one weight in the file. OpenVINO
(2026.4) takes a number that its result is multiplied with (``1.7159 * tanh(0.666 * layer(x))``) into the
weight, and where others read the weight, too, it computes the product in floats.
"""

from __future__ import annotations

from typing import Any

from backquant.deploy.onnx.initializers import add_initializer

_PRODUCTS = frozenset({"MatMul", "Gemm"})
_WEIGHT = 1


def separate_weights(model: Any) -> None:
    """Copy a weight for each such product but one. Changes an ``onnx_ir.Model``."""
    for node in list(model.graph):
        if node.op_type != "DequantizeLinear" or node.inputs[0].const_value is None:
            continue
        uses = list(node.outputs[0].uses())
        scaled = [use for use in uses if use.idx == _WEIGHT and _is_scaled(use.node)]
        kept = 1 if len(scaled) == len(uses) else 0
        for use in scaled[kept:]:
            use.node.replace_input_with(_WEIGHT, _copied(model, node, use.node))


def _is_scaled(product: Any) -> bool:
    """Whether the result of a product, with its bias added, is multiplied with a constant."""
    if product.op_type not in _PRODUCTS:
        return False
    reader = _only_reader(product)
    if reader is not None and reader.op_type == "Add" and _reads_constant(reader):
        reader = _only_reader(reader)
    return reader is not None and reader.op_type in ("Mul", "Div") and _reads_constant(reader)


def _only_reader(node: Any) -> Any:
    uses = node.outputs[0].uses()
    return uses[0].node if len(uses) == 1 else None


def _reads_constant(node: Any) -> bool:
    return any(value.const_value is not None for value in node.inputs)


def _copied(model: Any, node: Any, reader: Any) -> Any:
    import onnx_ir as ir

    integers = node.inputs[0]
    copied = add_initializer(model, integers.const_value.numpy(), integers.name)
    inputs, attributes = [copied, *node.inputs[1:]], list(node.attributes.values())
    made = ir.Node("", node.op_type, inputs, attributes=attributes, name=f"{reader.name}/weight")
    made.metadata_props.update(node.metadata_props)
    value, result = node.outputs[0], made.outputs[0]
    result.name, result.type, result.shape = f"{reader.name}/weight", value.type, value.shape
    model.graph.insert_before(reader, made)
    return result
