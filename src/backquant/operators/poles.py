"""Operands at which 0 has no finite result: divisors, and what logarithms and inverse roots read."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_OF_ONE = ("log", "log2", "log10", "rsqrt", "reciprocal")
_OF_ONE_SPELLED = frozenset(
    spelling
    for name in _OF_ONE
    for spelling in (
        *(name, f"{name}_", getattr(torch, name)),
        *(getattr(_aten, name).default, getattr(_aten, f"{name}_").default),
    )
)
_DIVISIONS = frozenset(
    {
        *(operator.truediv, operator.itruediv, operator.floordiv, operator.mod),
        *(torch.div, torch.true_divide, torch.divide, torch.floor_divide),
        *(torch.remainder, torch.fmod),
        *("div", "div_", "true_divide", "divide", "floor_divide", "remainder", "fmod"),
        *(_aten.div.Tensor, _aten.div_.Tensor, _aten.div.Tensor_mode, _aten.true_divide.Tensor),
        *(_aten.divide.Tensor, _aten.floor_divide.default),
        *(_aten.remainder.Tensor, _aten.fmod.Tensor),
    }
)
_POWERS = frozenset(
    {operator.pow, torch.pow, "pow", "pow_", _aten.pow.Tensor_Scalar, _aten.pow_.Scalar}
)


def operand_without_zero(node: fx.Node, target: Any) -> fx.Node | None:
    """The tensor that a call of ``target`` cannot read as 0; ``None`` where there is none.

    >>> graph = fx.symbolic_trace(lambda x, y: (torch.log(x), x / (y + 1), x**-0.5, x**2)).graph
    >>> [str(operand_without_zero(node, node.target)) for node in graph.nodes if node.op == "call_function"]
    ['x', 'None', 'add', 'x', 'None']
    """
    first, *others = (*node.args, None)
    other = others[0] if len(others) > 1 else node.kwargs.get("other", node.kwargs.get("exponent"))
    if target in _OF_ONE_SPELLED:
        value = first if node.args else node.kwargs.get("input")
    elif target in _DIVISIONS:
        value = other
    elif target in _POWERS and isinstance(other, int | float) and other < 0:
        value = first
    else:
        value = None
    return value if isinstance(value, fx.Node) else None
