"""Reading the QDQ dialect: quantize and dequantize nodes with literal qparams.

Source of the operators: ``torch.ops.quantized_decomposed`` (quantize_per_tensor.default,
dequantize_per_tensor.default, dequantize_per_channel.default), registered by
``backquant.graph.requantize``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node

from backquant.dtypes import QParams

_NAMESPACE = "quantized_decomposed"
_QUANTIZE_ROUNDED = "backquant.quantize_rounded.default"
#: Operators of this package that quantize, with the position of their argument `scale`.
_DESCRIBED = {_QUANTIZE_ROUNDED: 1, "backquant.requantize.default": 3}


def quantize_target() -> Any:
    """The operator of a quantize node."""
    return torch.ops.quantized_decomposed.quantize_per_tensor.default


def dequantize_target() -> Any:
    """The operator of a dequantize node."""
    return torch.ops.quantized_decomposed.dequantize_per_tensor.default


def _is_op(node: Node, name: str) -> bool:
    return node.op == "call_function" and _name_of(node.target) == name


@lru_cache(maxsize=4096)
def _name_of(target: Any) -> str:
    """The name of a default overload of ``quantized_decomposed``; empty for anything else."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != _NAMESPACE:
        return ""
    return target._schema.name.partition("::")[2] if target._overloadname == "default" else ""


def is_quantize(node: Any) -> bool:
    """Whether ``node`` quantizes a float tensor with literal per-tensor qparams."""
    return isinstance(node, Node) and _is_op(node, "quantize_per_tensor") and _is_literal(node)


def is_described_quantize(node: Any) -> bool:
    """Whether ``node`` quantizes with a rounding or a requantization that the description names."""
    called = isinstance(node, Node) and node.op == "call_function"
    return called and str(node.target) in _DESCRIBED


def described_arithmetic(node: Node) -> tuple[str, str]:
    """The requantization and the rounding of a quantize node, by name.

    >>> graph = torch.fx.Graph()
    >>> described_arithmetic(graph.call_function(quantize_target(), (graph.placeholder("x"),)))
    ('float', 'half_even')
    """
    if not is_described_quantize(node):
        return "float", "half_even"
    requantization, rounding = node.args[-2:]
    if str(node.target) == _QUANTIZE_ROUNDED:
        requantization = "float"
    return str(requantization), str(rounding)


def is_dequantize(node: Any) -> bool:
    """Whether ``node`` dequantizes an integer tensor with literal per-tensor qparams."""
    return isinstance(node, Node) and _is_op(node, "dequantize_per_tensor") and _is_literal(node)


def is_channel_dequantize(node: Any) -> bool:
    """Whether ``node`` dequantizes an integer tensor per channel (a functional weight)."""
    return isinstance(node, Node) and _is_op(node, "dequantize_per_channel")


def is_block_dequantize(node: Any) -> bool:
    """Whether ``node`` dequantizes an integer tensor in groups or blocks (a functional weight)."""
    is_call = isinstance(node, Node) and node.op == "call_function"
    return is_call and str(node.target) == "backquant.dequantize_blocks.default"


def is_weight_dequantize(node: Any) -> bool:
    """Whether ``node`` dequantizes a functional weight of several scales."""
    return is_channel_dequantize(node) or is_block_dequantize(node)


def _is_literal(node: Node) -> bool:
    return (
        len(node.args) == 6
        and not any(isinstance(a, Node) for a in node.args[1:])
        and (not node.kwargs or all(value is None for value in node.kwargs.values()))
    )


def qparams_of(node: Node) -> QParams:
    """The qparams of a quantize or dequantize node."""
    first = _DESCRIBED.get(str(node.target), 1)
    scale, zero_point, low, high, dtype = node.args[first : first + 5]
    return QParams(float(scale), int(zero_point), int(low), int(high), dtype)  # type: ignore[arg-type]


def integer_source(node: Node) -> Node:
    """The integer tensor that a dequantize node reads."""
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def quantized_value(value: float, qparams: QParams) -> int:
    """The integer that a float is quantized to, with the arithmetic of the quantize operator.

    >>> quantized_value(float("inf"), QParams(0.5, 10, 0, 127, torch.uint8))
    127
    """
    scaled = torch.round(torch.tensor(value, dtype=torch.float32) * (1.0 / qparams.scale))
    return int(torch.clamp(scaled + qparams.zero_point, qparams.quant_min, qparams.quant_max))
