"""Dynamically quantized products on integers: DynamicQuantizeLinear → MatMulInteger → Cast → Mul (→ Add).

Runtimes read ``DequantizeLinear(weight)`` behind a dynamic quantization as a float product, so the
integer product is written out:

    x @ w + b  ≈  float((x_q - x_zero) @ w_q) * (x_scale * w_scale) + b

The weight is symmetric: its zero points are zero, and its scale is per column or one. Source: ONNX
operator documentation, DynamicQuantizeLinear-11 and MatMulInteger-10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from backquant.deploy.onnx.initializers import add_initializer, drop_unused

_FLOAT = 1  # the ONNX type


@dataclass(frozen=True)
class _Product:
    """A float product of a dynamically quantized value and an integer weight."""

    node: Any
    dynamic: Any  # DynamicQuantizeLinear
    weight: np.ndarray[Any, Any]  # [K, N]
    scale: np.ndarray[Any, Any]  # [N] or []
    bias: Any


def use_integer_products(model: Any) -> None:
    """Rewrite every MatMul and Gemm between such operands, in place.

    What reads a dynamically quantized value otherwise keeps its quantize and dequantize nodes.
    """
    for node in list(model.graph):
        product = _product(node)
        if product is not None:
            _rewrite(model, product)
    drop_unused(model)


def settle_types(model: Any) -> None:
    """Give what DynamicQuantizeLinear makes its ONNX types: torch has others for them, in place."""
    import onnx_ir as ir

    for node in model.graph:
        if node.op_type != "DynamicQuantizeLinear":
            continue
        integers, scale, zero_point = node.outputs
        integers.type = zero_point.type = ir.TensorType(ir.DataType.UINT8)
        scale.type = ir.TensorType(ir.DataType.FLOAT)
        integers.shape = node.inputs[0].shape
        scale.shape = zero_point.shape = ir.Shape([])


def _product(node: Any) -> _Product | None:
    if node.op_type not in ("MatMul", "Gemm"):
        return None
    dynamic = quantized_by(node.inputs[0])
    found = None if dynamic is None else _weight(node)
    if dynamic is None or found is None:
        return None
    bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
    return _Product(node, dynamic, *found, bias)


def quantized_by(value: Any) -> Any:
    """The DynamicQuantizeLinear that ``value`` is quantized and dequantized by; ``None`` where it is not."""
    for kind in ("DequantizeLinear", "QuantizeLinear"):
        producer = value.producer()
        if producer is None or producer.op_type != kind:
            return None
        scale = producer.inputs[1].producer()
        value = producer.inputs[0]
    return scale if scale is not None and scale.op_type == "DynamicQuantizeLinear" else None


def _weight(node: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    dequantize = node.inputs[1].producer()
    if dequantize is None or dequantize.op_type != "DequantizeLinear":
        return None
    constants = [value.const_value for value in dequantize.inputs]
    if any(value is None for value in constants):
        return None
    weight, scale, zero_point = (value.numpy() for value in constants)
    if weight.ndim != 2 or zero_point.any() or (node.op_type == "Gemm" and not _is_plain(node)):
        return None
    axis = dequantize.attributes["axis"].as_int() % 2 if scale.ndim == 1 and scale.size > 1 else 1
    if node.op_type == "Gemm" and _flag(node, "transB"):
        weight, axis = weight.T, 1 - axis if scale.size > 1 else 1
    return (np.ascontiguousarray(weight), scale) if axis == 1 else None


def _is_plain(node: Any) -> bool:
    factors = (node.attributes.get(name) for name in ("alpha", "beta"))
    return not _flag(node, "transA") and all(f is None or f.as_float() == 1.0 for f in factors)


def _flag(node: Any, name: str) -> bool:
    return name in node.attributes and bool(node.attributes[name].as_int())


def _rewrite(model: Any, product: _Product) -> None:
    import onnx_ir as ir

    old = product.node
    integers, scale, zero_point = product.dynamic.outputs
    weight = add_initializer(model, product.weight, f"{old.name}/weight")
    factor = add_initializer(model, product.scale, f"{old.name}/weight_scale")

    def node(kind: str, inputs: list[Any], attributes: list[Any] | None = None) -> Any:
        made = ir.Node("", kind, inputs, attributes or [], name=f"{old.name}/{kind}")
        made.outputs[0].name = f"{old.name}/{kind}_out"
        made.metadata_props.update(old.metadata_props)
        model.graph.insert_before(old, made)
        return made.outputs[0]

    scales = node("Mul", [scale, factor])
    sums = node("MatMulInteger", [integers, weight, zero_point])
    floats = node("Cast", [sums], [ir.AttrInt64("to", _FLOAT)])
    result = ir.Node("", "Mul", [floats, scales], name=f"{old.name}/Scale")
    result.metadata_props.update(old.metadata_props)
    model.graph.insert_before(old, result)
    last = result.outputs[0]
    last.name = f"{old.name}/Scale_out"
    if product.bias is not None:
        last = node("Add", [last, product.bias])
    last.type, last.shape = old.outputs[0].type, old.outputs[0].shape
    old.outputs[0].replace_all_uses_with(last, replace_graph_outputs=True)
    model.graph.remove(old, safe=True)
