"""Dynamically quantized products on integers: DynamicQuantizeLinear → MatMulInteger → Cast → Mul (→ Add).

Runtimes read ``DequantizeLinear(weight)`` behind a dynamic quantization as a float product, so the
integer product is written out:

    x @ w + b  ≈  float((x_q - x_zero) @ w_q) * (x_scale * w_scale) + b

The weight is symmetric: its zero points are zero, and its scale is per column or one. Source: ONNX
operator documentation, DynamicQuantizeLinear-11 and MatMulInteger-10.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backquant.deploy.onnx.blocks import is_plain
from backquant.deploy.onnx.rewrite import OnnxCalls, array_of, comes_from, input_of, rewrite

_FLOAT = 1  # the ONNX type


def use_integer_products(model: Any) -> None:
    """Rewrite every MatMul and Gemm between such operands, in place.

    What reads a dynamically quantized value otherwise keeps its quantize and dequantize nodes.
    """
    rewrite(model, {"MatMul": _integer_product, "Gemm": _integer_product})


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


def quantized_by(value: Any) -> Any:
    """The DynamicQuantizeLinear that ``value`` is quantized and dequantized by; ``None`` where it is not."""
    for kind in ("DequantizeLinear", "QuantizeLinear"):
        node = comes_from(value, kind)
        if node is None:
            return None
        value = node.inputs[0]
    return comes_from(node.inputs[1], "DynamicQuantizeLinear")


def _weight(node: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None:
    """The integers ``[K, N]`` and scales ``[N]`` or ``[]`` of the second operand."""
    dequantize = comes_from(node.inputs[1], "DequantizeLinear")
    constants = [] if dequantize is None else list(map(array_of, dequantize.inputs))
    if dequantize is None or any(value is None for value in constants):
        return None
    weight, scale, zero_point = constants
    if weight.ndim != 2 or zero_point.any() or not is_plain(node):
        return None
    axis = dequantize.attributes["axis"].as_int() % 2 if scale.ndim == 1 and scale.size > 1 else 1
    if node.attributes.get_int("transB", 0):
        weight, axis = weight.T, 1 - axis if scale.size > 1 else 1
    return (weight, scale) if axis == 1 else None


def _integer_product(node: Any) -> Any:
    dynamic = quantized_by(node.inputs[0])
    found = None if dynamic is None else _weight(node)
    if found is None:
        return None
    integers, scale, zero_point = dynamic.outputs
    weight, factor = found
    write, bias = OnnxCalls(node), input_of(node, 2)
    scales = write.Mul(scale, write.constant(factor, f"{node.name}/weight_scale"))
    weights = write.constant(weight, f"{node.name}/weight")
    sums = write.MatMulInteger(integers, weights, zero_point)
    product = write.Mul(write.Cast(sums, to=_FLOAT), scales)
    return product if bias is None else write.Add(product, bias)
