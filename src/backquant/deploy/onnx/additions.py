"""Float additions of two activations as ``Sum``, which runtimes leave a kernel of its own.

Source: ONNX operator documentation, Add-14 and Sum-13: the same result, with the same broadcasting.
"""

from __future__ import annotations

from typing import Any

__all__ = ["write_sums"]


def write_sums(model: Any) -> None:
    """Rewrite every Add of floats that are no constants, in place; quantized additions stay."""
    for node in model.graph:
        if node.op_type != "Add" or not all(_is_float(value) for value in node.inputs):
            continue
        if not all(_is_dequantized(value) for value in node.inputs):
            node.op_type = "Sum"


def _is_float(value: Any) -> bool:
    kind = value.dtype
    return value.const_value is None and kind is not None and bool(kind.is_floating_point())


def _is_dequantized(value: Any) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == "DequantizeLinear"
