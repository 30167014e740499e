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

from backquant.deploy.onnx.provenance import ORIGIN
from backquant.deploy.onnx.rewrite import OnnxCalls, array_of, input_of, rewrite

__all__ = ["is_blocked", "is_plain", "narrow_constants", "settle_blocks", "transposed_blocks"]


def is_blocked(node: Any) -> bool:
    """Whether a node dequantizes a constant with one scale for each group."""
    return (
        node is not None
        and node.op_type == "DequantizeLinear"
        and "block_size" in node.attributes
        and node.inputs[0].const_value is not None
    )


def is_plain(product: Any) -> bool:
    """Whether a product has no factors, and does not transpose its first operand."""
    attributes = product.attributes
    factors = [attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
    return factors == [1.0, 1.0] and not attributes.get_int("transA", 0)


def settle_blocks(model: Any) -> None:
    """Rewrite, in place, every weight in groups (rules 1 and 2)."""
    rewrite(model, {"Gemm": _as_matmul})
    rewrite(model, {"DequantizeLinear": lambda node: _narrow(node) if is_blocked(node) else None})


def narrow_constants(model: Any, origins: Collection[str]) -> None:
    """Apply rule 1, in place, to constants with one scale, or one for each channel, made for ``origins``."""

    def narrow(node: Any) -> None:
        is_meant = node.metadata_props.get(ORIGIN) in origins
        if is_meant and all(value.const_value is not None for value in node.inputs):
            _narrow(node)

    rewrite(model, {"DequantizeLinear": narrow})


def _as_matmul(node: Any) -> Any:
    """``Gemm(x, w, b)`` as ``MatMul(x, w)`` and ``Add``: rule 2."""
    x, weight, bias = (input_of(node, place) for place in range(3))
    if not is_blocked(weight.producer()) or not is_plain(node):
        return None
    if node.attributes.get_int("transB", 0):
        weight = transposed_blocks(weight.producer(), [1, 0])
    product = OnnxCalls(node).MatMul(x, weight)
    product.shape = node.outputs[0].shape
    return product if bias is None else OnnxCalls(node).Add(product, bias)


def transposed_blocks(node: Any, permutation: list[int]) -> Any:
    """What a dequantized constant in groups gives, transposed: the constants are."""
    import onnx_ir as ir

    write = OnnxCalls(node)
    arrays = [array_of(value).transpose(permutation) for value in node.inputs]
    axis = node.attributes["axis"].as_int() % len(permutation)
    made = write.again(
        *(
            write.constant(*pair)
            for pair in zip(arrays, (v.name for v in node.inputs), strict=True)
        ),
        axis=permutation.index(axis),
    )
    made.shape = ir.Shape(arrays[0].shape)
    return made


def _narrow(node: Any) -> None:
    """Rule 1."""
    import onnx_ir as ir

    if len(node.inputs) < 3:
        return
    weight, zero_point = (array_of(node.inputs[i]) for i in (0, 2))
    signed = weight.dtype == np.int8
    ends = (-8, 7) if signed else (0, 15)
    fits = all(a.size and ends[0] <= a.min() and a.max() <= ends[1] for a in (weight, zero_point))
    if fits:
        target = (ir.DataType.INT4 if signed else ir.DataType.UINT4).numpy()
        for place, array in ((0, weight), (2, zero_point)):
            name = str(node.inputs[place].name)
            node.replace_input_with(place, OnnxCalls(node).constant(array.astype(target), name))
    if not zero_point.any():
        node.resize_inputs(2)
