"""Operands at which 0 has no finite result: divisors, and what logarithms and inverse roots read."""

from __future__ import annotations

from typing import Any

from torch import fx

_OF_ONE = frozenset({"log", "log2", "log10", "rsqrt", "reciprocal"})
_DIVISIONS = frozenset(
    {
        *("div", "divide", "true_divide", "floor_divide", "remainder", "fmod"),
        *("truediv", "itruediv", "floordiv", "ifloordiv", "mod", "imod"),
    }
)


def operand_without_zero(node: fx.Node, target: Any) -> fx.Node | None:
    """The tensor that a call of ``target`` cannot read as 0; ``None`` where there is none.

    >>> graph = fx.symbolic_trace(lambda x, y: (x.log(), x / (y + 1), x**-0.5, x**2)).graph
    >>> [str(operand_without_zero(n, n.target)) for n in graph.nodes if n.op.startswith("call")]
    ['x', 'None', 'add', 'x', 'None']
    """
    named = target if isinstance(target, str) else getattr(target, "_opname", None)
    name = str(named or getattr(target, "__name__", "")).removesuffix("_")
    given = dict(zip(("input", "other"), node.args, strict=False)) | node.kwargs
    other = given.get("other", given.get("exponent"))
    value = None
    if name in _OF_ONE or (name == "pow" and isinstance(other, int | float) and other < 0):
        value = given.get("input")
    elif name in _DIVISIONS:
        value = other
    return value if isinstance(value, fx.Node) else None
