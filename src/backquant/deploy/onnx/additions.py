"""Float additions of two activations, written as ``Sum``: runtimes do not fuse it with the next operator.

Source: ONNX operator documentation, Add-14 and Sum-13: the same result, with the same broadcasting.
"""

from __future__ import annotations

from typing import Any


def write_sums(model: Any) -> None:
    """Rewrite every Add of floats, in place; those of biases and of quantized values stay."""
    for node in model.graph:
        if node.op_type != "Add" or not all(_is_activation(value) for value in node.inputs):
            continue
        if not all(_is_dequantized(value) for value in node.inputs):
            node.op_type = "Sum"


def _is_activation(value: Any) -> bool:
    """Floats, as an activation or a constant has them that is no bias: a position embedding."""
    kind, constant = value.dtype, value.const_value
    if kind is None or not kind.is_floating_point():
        return False
    return constant is None or len(constant.shape) > 1


def _is_dequantized(value: Any) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == "DequantizeLinear"
