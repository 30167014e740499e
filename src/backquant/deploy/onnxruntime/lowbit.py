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
from backquant.deploy.onnx.rewrite import OnnxCalls, array_of, rewrite

_DOMAIN = "com.microsoft"
_FLOAT32 = 1  # accuracy_level


def use_group_kernels(model: Any) -> None:
    """Rewrite, in place, every product with 4-bit weights in groups, and every look-up in such a table."""
    rewrite(model, {"MatMul": _product, "Gather": _look_up})


def _is_of_4_bits(dequantize: Any, axis: int) -> bool:
    if not is_blocked(dequantize):
        return False
    weight = dequantize.inputs[0].const_value
    own = dequantize.attributes["axis"].as_int() % len(weight.shape)
    return weight.dtype.name in ("INT4", "UINT4") and len(weight.shape) == 2 and own == axis


def _parts(dequantize: Any) -> tuple[Any, Any, Any, int]:
    """Unsigned values, scales, zero points (None: 8 for all) and the group size."""
    more = 8 if dequantize.inputs[0].const_value.dtype.name == "INT4" else 0
    weight, scale, *zero_point = map(array_of, dequantize.inputs)
    values, zero = (weight.astype(np.int8) + more).astype(np.uint8), None
    if zero_point:
        zero = zero_point[0].astype(np.int8) + more
    elif not more:
        zero = np.zeros(scale.shape, np.int8)
    return values, scale, zero, dequantize.attributes["block_size"].as_int()


def _packed(values: Any) -> Any:
    """Two to a byte along the last axis, the first in the lower half."""
    values = values.astype(np.uint8)
    if values.shape[-1] % 2:
        values = np.concatenate([values, np.zeros((*values.shape[:-1], 1), np.uint8)], -1)
    return np.ascontiguousarray(values[..., 0::2] | (values[..., 1::2] << 4))


def _product(node: Any) -> Any:
    x, weight = node.inputs
    dequantize, write = weight.producer(), OnnxCalls(node)
    if not _is_of_4_bits(dequantize, axis=0):
        return None
    values, scale, zero_point, size = _parts(dequantize)
    inner, outer = values.shape
    name = str(dequantize.inputs[0].name)
    held = [
        write.constant(_packed(values.T.reshape(outer, inner // size, size)), name),
        write.constant(scale.T, f"{name}_scale"),
    ]
    if zero_point is not None:
        held.append(write.constant(_packed(zero_point.T), f"{name}_zero_point"))
    numbers = {"K": inner, "N": outer, "bits": 4, "block_size": size, "accuracy_level": _FLOAT32}
    return write.call("MatMulNBits", x, *held, domain=_DOMAIN, **numbers)


def _look_up(node: Any) -> Any:
    table, rows = node.inputs
    dequantize = table.producer()
    if not _is_of_4_bits(dequantize, axis=1):
        return None
    weight, *qparams = dequantize.inputs
    size = dequantize.attributes["block_size"].as_int()
    numbers = {"gather_axis": 0, "quantize_axis": 1, "block_size": size}
    return OnnxCalls(node).call(
        "GatherBlockQuantized", weight, rows, *qparams, domain=_DOMAIN, **numbers
    )
