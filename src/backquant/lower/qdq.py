"""Reading the QDQ dialect: quantize and dequantize nodes with literal qparams.

Source of the operators: ``torch.ops.quantized_decomposed`` (quantize_per_tensor.default,
dequantize_per_tensor.default, dequantize_per_channel.default), registered by
``backquant.graph.dialect_ops``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch.fx import Node

from backquant.dtypes import QParams, is_narrow_float
from backquant.operators import overload

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


def is_quantize(node: object) -> bool:
    """Whether ``node`` quantizes a float tensor with literal per-tensor qparams."""
    return isinstance(node, Node) and _is_op(node, "quantize_per_tensor") and _is_literal(node)


def is_described_quantize(node: object) -> bool:
    """Whether ``node`` quantizes with a rounding or a requantization that the description names."""
    return isinstance(node, Node) and node.op == "call_function" and str(node.target) in _DESCRIBED


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


def is_dequantize(node: object) -> bool:
    """Whether ``node`` dequantizes an integer tensor with literal per-tensor qparams."""
    return isinstance(node, Node) and _is_op(node, "dequantize_per_tensor") and _is_literal(node)


def is_channel_dequantize(node: object) -> bool:
    """Whether ``node`` dequantizes an integer tensor per channel (a functional weight)."""
    return isinstance(node, Node) and _is_op(node, "dequantize_per_channel")


def is_block_dequantize(node: object) -> bool:
    """Whether ``node`` dequantizes an integer tensor in groups or blocks (a functional weight)."""
    return _name(node) == "backquant.dequantize_blocks.default"


def is_weight_dequantize(node: object) -> bool:
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
    literals: tuple[Any, ...] = node.args[first : first + 5]
    scale, zero_point, low, high, dtype = literals
    return QParams(float(scale), int(zero_point), int(low), int(high), dtype)


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


# Reading what is quantized at each call: dynamic integers, and casts to a narrower float.
#
# The nodes are those of ``backquant.convert.dialects`` in the decomposed dialect:
#
# 1. dynamic: ``choose_qparams`` on a value, its two items, ``quantize_per_tensor.tensor`` and
#    ``dequantize_per_tensor.tensor`` with them;
# 2. dynamic float16 or bfloat16: ``aten.to.dtype`` there and back, which a kernel may leave out;
# 3. dynamic, per token: the same operators per token, with a scale for each slice along the last axis;
# 4. static float16 or bfloat16: ``convert_element_type.no_fuse`` there and back, which it may not.

_CHOOSE = {
    "quantized_decomposed.choose_qparams.tensor": False,
    "quantized_decomposed.choose_qparams_symmetric.tensor": True,
}
_QUANTIZE = "quantized_decomposed.quantize_per_tensor.tensor"
_DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.tensor"
_TOKENS = (
    "quantized_decomposed.choose_qparams_per_token_asymmetric.default",
    "quantized_decomposed.quantize_per_token.default",
    "quantized_decomposed.dequantize_per_token.default",
)
_STATIC_CAST = "quantized_decomposed.convert_element_type.no_fuse"


@dataclass(frozen=True)
class DynamicInput:
    """A value that is quantized at each call: ``source`` is the float node it is computed from.

    ``dtype`` is uint8 or int8 with the range and the least scale ``eps``, or a narrower float.
    """

    source: Node
    dtype: torch.dtype
    quant_min: int = 0
    quant_max: int = 0
    eps: float = 0.0
    symmetric: bool = False


@cache
def _dynamic_cast() -> str:
    return str(overload("to"))


def _name(node: object) -> str:
    if isinstance(node, Node) and node.op == "call_function":
        return str(node.target)
    return ""


def _args(node: object, *names: str) -> tuple[Any, ...]:
    """What a call of an operator of such a name is given; ``(None,)`` for anything else."""
    return node.args if isinstance(node, Node) and _name(node) in names else (None,)


def dynamic_input(node: object) -> DynamicInput | None:
    """The dynamically quantized value that ``node`` dequantizes; ``None`` if it dequantizes no such value.

    >>> graph = torch.fx.Graph()
    >>> x = graph.placeholder("x")
    >>> half = graph.call_function(torch.ops.aten.to.dtype, (x, torch.float16))
    >>> back = graph.call_function(torch.ops.aten.to.dtype, (half, torch.float32))
    >>> dynamic_input(back).dtype, dynamic_input(half)
    (torch.float16, None)
    """
    cast = _cast(node, _dynamic_cast())
    if cast is not None:
        return DynamicInput(*cast)
    quantized, *own = _args(node, _DEQUANTIZE)
    source, *qparams = _args(quantized, _QUANTIZE)
    if source is None or qparams != own:
        return None
    scale, zero_point, low, high, dtype = qparams
    chosen = _chosen(scale, zero_point)
    if chosen is None or not isinstance(source, Node) or chosen.args[0] is not source:
        return None
    eps: Any = chosen.args[3]
    return DynamicInput(source, dtype, int(low), int(high), float(eps), _CHOOSE[_name(chosen)])


def token_input(node: object) -> DynamicInput | None:
    """What ``node`` is the dequantized form of, with one scale for each slice along the last axis; else
    ``None``.
    """
    source, *qparams = _args(_args(node, _TOKENS[2])[0], _TOKENS[1])
    if source is None:
        return None
    scale, zero_point, low, high, dtype = qparams
    if not _is_item(scale, 0) or not _is_item(zero_point, 1) or scale.args[0].args[0] is not source:
        return None
    return DynamicInput(source, dtype, int(low), int(high))


def _is_item(node: object, number: int) -> bool:
    return isinstance(node, Node) and node.target is operator.getitem and node.args[1:] == (number,)


def _chosen(scale: Any, zero_point: Any) -> Node | None:
    """The ``choose_qparams`` node from which scale and zero point both come."""
    if not _is_item(scale, 0) or not _is_item(zero_point, 1):
        return None
    chosen: Node = scale.args[0]
    return chosen if _name(chosen) in _CHOOSE and zero_point.args[0] is chosen else None


def _cast(node: object, name: str) -> tuple[Node, torch.dtype] | None:
    narrow, *dtype = _args(node, name)
    source, *narrower = _args(narrow, name)
    if source is None or dtype[0] != torch.float32 or not is_narrow_float(narrower[0]):
        return None
    return source, narrower[0]


def narrow_constant(node: object) -> Node | None:
    """The stored tensor that ``node`` widens to float32: a float16 or bfloat16 weight of a function."""
    stored, *dtype = _args(node, _dynamic_cast(), _STATIC_CAST)
    known = isinstance(stored, Node) and stored.op == "get_attr" and dtype[0] == torch.float32
    return stored if known else None


def static_cast(node: object) -> tuple[Node, torch.dtype] | None:
    """The value that ``node`` casts to a narrower dtype and the dtype, if the cast changes the result."""
    source, *dtype = _args(node, _STATIC_CAST)
    return None if source is None else (source, dtype[0])


def widened_constant(node: object) -> tuple[Any, torch.dtype | None]:
    """The node below a static cast there and back, with the narrower dtype; else ``node`` itself."""
    cast = _cast(node, _STATIC_CAST)
    return (node, None) if cast is None else cast


def is_dynamic_boundary(node: object) -> bool:
    """Whether ``node`` is one of those above, or stands between them.

    >>> graph = torch.fx.Graph()
    >>> is_dynamic_boundary(graph.call_function(torch.relu, (graph.placeholder("x"),)))
    False
    """
    if _name(node) in (*_CHOOSE, *_TOKENS, _QUANTIZE, _DEQUANTIZE, _STATIC_CAST, _dynamic_cast()):
        return True
    chosen = (*_CHOOSE, _TOKENS[0])
    item = _is_item(node, 0) or _is_item(node, 1)
    return item and isinstance(node, Node) and _name(node.args[0]) in chosen
