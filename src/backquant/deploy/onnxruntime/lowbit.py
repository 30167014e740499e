"""Weights in groups as ONNX Runtime's own operators, which name the precision of the activations.

A ``DequantizeLinear`` with ``block_size`` before a ``MatMul`` is fused to ``MatMulNBits`` when a session is
made, with activations rounded to 8 bits unless the session is told otherwise. Here the file itself says what
the description does: 1 float32 (``accuracy_level``). A table that a ``Gather`` reads is
``GatherBlockQuantized``: only the rows that are read become floats.

Source: ONNX Runtime's documentation of contrib operators (``com.microsoft``), MatMulNBits and
GatherBlockQuantized.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backquant.deploy.onnx.blocks import is_blocked
from backquant.deploy.onnx.initializers import add_initializer, drop_unused

_DOMAIN = "com.microsoft"
_FLOAT32 = 1  # accuracy_level


def use_group_kernels(model: Any) -> None:
    """Rewrite, in place, every product with 4-bit weights in groups, and every look-up in such a table."""
    changed = False
    for node in list(model.graph):
        if node.op_type == "MatMul" and _is_of_4_bits(node.inputs[1].producer(), axis=0):
            _product(model, node)
            changed = True
        elif node.op_type == "Gather" and _is_of_4_bits(node.inputs[0].producer(), axis=1):
            _look_up(model, node)
            changed = True
    if changed:
        model.opset_imports[_DOMAIN] = 1
        drop_unused(model)


def _is_of_4_bits(dequantize: Any, axis: int) -> bool:
    if not is_blocked(dequantize):
        return False
    weight = dequantize.inputs[0].const_value
    own = dequantize.attributes["axis"].as_int() % len(weight.shape)
    return weight.dtype.name in ("INT4", "UINT4") and len(weight.shape) == 2 and own == axis


def _parts(dequantize: Any) -> tuple[Any, Any, Any, int]:
    """Unsigned values, scales, zero points (None: 8 for all) and the group size."""
    weight = dequantize.inputs[0].const_value
    signed = weight.dtype.name == "INT4"
    values = weight.numpy().astype(np.int8)
    zero_point = None
    if len(dequantize.inputs) > 2:
        zero_point = dequantize.inputs[2].const_value.numpy().astype(np.int8) + (8 if signed else 0)
    elif not signed:
        zero_point = np.zeros(dequantize.inputs[1].const_value.shape, np.int8)
    scale = dequantize.inputs[1].const_value.numpy()
    unsigned = (values + (8 if signed else 0)).astype(np.uint8)
    return unsigned, scale, zero_point, dequantize.attributes["block_size"].as_int()


def _packed(values: Any) -> Any:
    """Two to a byte along the last axis, the first in the lower half."""
    values = values.astype(np.uint8)
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros((*values.shape[:-1], 1), np.uint8)], -1)
    return np.ascontiguousarray(values[..., 0::2] | (values[..., 1::2] << 4))


def _product(model: Any, node: Any) -> None:
    import onnx_ir as ir

    dequantize = node.inputs[1].producer()
    values, scale, zero_point, size = _parts(dequantize)
    inner, outer = values.shape
    blocks = _packed(values.T.reshape(outer, inner // size, size))
    name = str(dequantize.inputs[0].name)
    inputs = [
        node.inputs[0],
        add_initializer(model, blocks, name),
        add_initializer(model, np.ascontiguousarray(scale.T), f"{name}_scale"),
    ]
    if zero_point is not None:
        inputs.append(add_initializer(model, _packed(zero_point.T), f"{name}_zero_point"))
    numbers = {"K": inner, "N": outer, "bits": 4, "block_size": size, "accuracy_level": _FLOAT32}
    attributes = [ir.AttrInt64(key, value) for key, value in numbers.items()]
    _replace(model, node, ir.Node(_DOMAIN, "MatMulNBits", inputs, attributes))


def _look_up(model: Any, node: Any) -> None:
    import onnx_ir as ir

    dequantize = node.inputs[0].producer()
    size = dequantize.attributes["block_size"].as_int()
    inputs = [dequantize.inputs[0], node.inputs[1], *dequantize.inputs[1:]]
    numbers = {"gather_axis": 0, "quantize_axis": 1, "block_size": size}
    attributes = [ir.AttrInt64(key, value) for key, value in numbers.items()]
    _replace(model, node, ir.Node(_DOMAIN, "GatherBlockQuantized", inputs, attributes))


def _replace(model: Any, old: Any, made: Any) -> None:
    made.name = f"{old.name}/{made.op_type}"
    result = made.outputs[0]
    result.name = f"{old.outputs[0].name}_groups"
    result.type, result.shape = old.outputs[0].type, old.outputs[0].shape
    made.metadata_props.update(old.metadata_props)
    model.graph.insert_before(old, made)
    old.outputs[0].replace_all_uses_with(result, replace_graph_outputs=True)
    model.graph.remove(old, safe=True)
