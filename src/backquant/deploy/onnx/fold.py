"""Casts and transposes of constants, computed when the file is written.

The exporter does this for small constants only; weights are larger than its limit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backquant.deploy.onnx.blocks import transposed_blocks
from backquant.deploy.onnx.initializers import add_initializer, drop_unused


def fold_integer_constants(model: Any) -> None:
    """Fold Cast of integers, and Transpose behind a per-channel or per-tensor DequantizeLinear, in place."""
    for node in list(model.graph):
        if node.op_type == "Cast" and _is_constant(node.inputs[0]):
            _fold_cast(model, node)
        elif node.op_type == "Transpose":
            _fold_transpose(model, node)
    drop_unused(model)


def _is_constant(value: Any) -> bool:
    return value is not None and value.const_value is not None


def _fold_cast(model: Any, node: Any) -> None:
    import onnx_ir as ir

    source = node.inputs[0].const_value
    target = ir.DataType(node.attributes["to"].as_int())
    if not _is_integer(source.dtype) or not _is_integer(target):
        return
    array = source.numpy().astype(target.numpy())
    _replace(model, node.outputs[0], array)
    model.graph.remove(node, safe=True)


def _is_integer(dtype: Any) -> bool:
    return str(dtype.name).startswith(("INT", "UINT"))


def _is_stored(dtype: Any) -> bool:
    """Integers, or 8-bit floats: what weights are stored in."""
    return _is_integer(dtype) or str(dtype.name).startswith("FLOAT8")


def _fold_transpose(model: Any, node: Any) -> None:
    """Weights are transposed as integers: DequantizeLinear(w, axis) → Transpose is one DequantizeLinear."""
    source = node.inputs[0]
    rank = None if source.shape is None else len(source.shape)
    made = transposed_dequantize(model, source, _permutation(node, rank or 2), before=node)
    if made is not None:
        node.outputs[0].replace_all_uses_with(made)
        model.graph.remove(node, safe=True)


def transposed_dequantize(model: Any, value: Any, permutation: list[int], *, before: Any) -> Any:
    """A dequantized integer constant, transposed; ``None`` if ``value`` is no such thing."""
    import onnx_ir as ir

    dequantize = value.producer()
    if dequantize is None or dequantize.op_type != "DequantizeLinear":
        return None
    weight = dequantize.inputs[0]
    if "block_size" in dequantize.attributes:
        constant = all(_is_constant(given) for given in dequantize.inputs)
        return (
            transposed_blocks(model, dequantize, permutation, before=before) if constant else None
        )
    if not _is_constant(weight) or not _is_stored(weight.const_value.dtype):
        return None
    array = np.ascontiguousarray(weight.const_value.numpy().transpose(permutation))
    inputs = [add_initializer(model, array, weight.name), *dequantize.inputs[1:]]
    attributes = []
    if inputs[1].shape is not None and len(inputs[1].shape) == 1:
        axis = dequantize.attributes["axis"].as_int() % array.ndim
        attributes.append(ir.AttrInt64("axis", permutation.index(axis)))
    made = ir.Node("", "DequantizeLinear", inputs, attributes, name=f"{dequantize.name}/transposed")
    made.outputs[0].name = f"{value.name}_transposed"
    made.outputs[0].shape, made.outputs[0].type = ir.Shape(array.shape), value.type
    made.metadata_props.update(dequantize.metadata_props)
    model.graph.insert_before(before, made)
    return made.outputs[0]


def _permutation(node: Any, rank: int) -> list[int]:
    given = node.attributes.get("perm")
    return list(range(rank))[::-1] if given is None else list(given.as_ints())


def _replace(model: Any, value: Any, array: np.ndarray[Any, Any]) -> None:
    value.replace_all_uses_with(add_initializer(model, array, value.name))
