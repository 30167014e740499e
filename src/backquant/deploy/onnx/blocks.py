"""Weights in groups: ``DequantizeLinear`` with ``block_size``, in the form that runtimes have kernels for.

1. Integers that fit into four bits are written as INT4 or UINT4, two to a byte (opset 21). Zero points of
   zero are left out.
2. A weight that a matrix product reads has its groups along axis 0: ``[K, N]``, no Transpose behind it.

Source: ONNX operator documentation, DequantizeLinear-21.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from backquant.deploy.onnx.initializers import add_initializer, drop_unused
from backquant.deploy.onnx.provenance import ORIGIN

__all__ = ["is_blocked", "narrow_constants", "settle_blocks", "transposed_blocks"]


def is_blocked(node: Any) -> bool:
    """Whether a node dequantizes a constant with one scale for each group."""
    return (
        node is not None
        and node.op_type == "DequantizeLinear"
        and "block_size" in node.attributes
        and node.inputs[0].const_value is not None
    )


def settle_blocks(model: Any) -> None:
    """Rewrite, in place, every weight in groups (rules 1 and 2)."""
    for node in list(model.graph):
        if node.op_type == "Gemm" and is_blocked(node.inputs[1].producer()):
            _as_matmul(model, node)
    for node in list(model.graph):
        if is_blocked(node):
            _narrow(model, node)
    drop_unused(model)


def narrow_constants(model: Any, origins: Collection[str]) -> None:
    """Apply rule 1, in place, to constants with one scale, or one for each channel, made for ``origins``."""
    for node in list(model.graph):
        is_meant = node.op_type == "DequantizeLinear" and node.metadata_props.get(ORIGIN) in origins
        if is_meant and all(value.const_value is not None for value in node.inputs):
            _narrow(model, node)
    drop_unused(model)


def _as_matmul(model: Any, node: Any) -> None:
    """``Gemm(x, w, b)`` as ``MatMul(x, w)`` and ``Add``: rule 2."""
    import onnx_ir as ir

    factors = (node.attributes.get(name) for name in ("alpha", "beta"))
    flags = [_flag(node, "transA"), _flag(node, "transB")]
    if flags[0] or not all(f is None or f.as_float() == 1.0 for f in factors):
        return
    weight = node.inputs[1]
    if flags[1]:
        weight = transposed_blocks(model, weight.producer(), [1, 0], before=node)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    product = ir.Node("", "MatMul", [node.inputs[0], weight], name=f"{node.name}/MatMul")
    made = product if bias is None else ir.Node("", "Add", [product.outputs[0], bias])
    for new in dict.fromkeys((product, made)):
        new.metadata_props.update(node.metadata_props)
        new.name = f"{node.name}/{new.op_type}"
        new.outputs[0].name = f"{node.outputs[0].name}_{new.op_type}"
        new.outputs[0].type, new.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
        model.graph.insert_before(node, new)
    node.outputs[0].replace_all_uses_with(made.outputs[0], replace_graph_outputs=True)
    model.graph.remove(node, safe=True)


def _flag(node: Any, name: str) -> bool:
    return name in node.attributes and bool(node.attributes[name].as_int())


def transposed_blocks(model: Any, node: Any, permutation: list[int], *, before: Any) -> Any:
    """What a dequantized constant in groups gives, transposed: the constants are."""
    import onnx_ir as ir

    arrays = [
        np.ascontiguousarray(v.const_value.numpy().transpose(permutation)) for v in node.inputs
    ]
    inputs = [
        add_initializer(model, array, str(value.name))
        for array, value in zip(arrays, node.inputs, strict=True)
    ]
    axis = node.attributes["axis"].as_int() % len(permutation)
    attributes = [
        ir.AttrInt64("axis", permutation.index(axis)),
        ir.AttrInt64("block_size", node.attributes["block_size"].as_int()),
    ]
    made = ir.Node("", "DequantizeLinear", inputs, attributes, name=f"{node.name}/transposed")
    result, old = made.outputs[0], node.outputs[0]
    result.name = f"{old.name}_transposed"
    result.shape, result.type = ir.Shape(arrays[0].shape), old.type
    made.metadata_props.update(node.metadata_props)
    model.graph.insert_before(before, made)
    return result


def _narrow(model: Any, node: Any) -> None:
    """Rule 1."""
    import onnx_ir as ir

    if len(node.inputs) < 3:
        return
    weight, zero_point = (node.inputs[i].const_value.numpy() for i in (0, 2))
    signed = weight.dtype == np.int8
    ends = (-8, 7) if signed else (0, 15)
    fits = all(a.size and ends[0] <= a.min() and a.max() <= ends[1] for a in (weight, zero_point))
    if fits:
        target = ir.DataType.INT4 if signed else ir.DataType.UINT4
        for place, array in ((0, weight), (2, zero_point)):
            made = add_initializer(
                model, array.astype(target.numpy()), str(node.inputs[place].name)
            )
            node.replace_input_with(place, made)
    if not zero_point.any():
        node.resize_inputs(2)
