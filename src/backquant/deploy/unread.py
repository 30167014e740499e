"""What computes values that no output of the model depends on: only their sizes are read.

Runtimes leave such operators out of the file, so that no kernel names them (MRA of transformers, which
computes zeros like its queries where it has no kernel of its own).
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx
from torch._ops import OpOverload

from backquant.graph.queries import nodes_in

__all__ = ["unread_nodes"]

_ARITHMETIC = (
    "add",
    "sub",
    "mul",
    "truediv",
    "floordiv",
    "pow",
    "mod",
    "and",
    "or",
    "xor",
    "matmul",
)
_LIKE = frozenset({"zeros_like", "ones_like", "full_like", "empty_like"})
_NEW = frozenset({"new_zeros", "new_ones", "new_full", "new_empty"})
_SIZES = frozenset({"size", "sym_size", "dim", "numel", "sym_numel", "ndimension", "nelement"})
# ``setitem`` and ``x += y``: of a view, they change what it is a view of
_CHANGING = {operator.setitem, setattr, *(getattr(operator, f"i{n}") for n in _ARITHMETIC)}
_OF_SIZES = _LIKE | _NEW | _SIZES


def unread_nodes(graph: fx.Graph) -> frozenset[str]:
    """Names of the calls of ``graph`` whose values reach no output.

    >>> import torch
    >>> def empty(x): return torch.zeros_like(x.sin()) + x.cos()
    >>> sorted(unread_nodes(fx.symbolic_trace(empty).graph))
    ['sin']
    """
    read: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in read or node.op == "output" or _changes(node):
            read.add(node)
            read.update(_values_of(node))
    return frozenset(
        node.name for node in graph.nodes if node.op.startswith("call_") and node not in read
    )


def _values_of(node: fx.Node) -> set[fx.Node]:
    """What a call reads the values of."""
    if not _reads_sizes(node):
        return set(node.all_input_nodes)
    return {*nodes_in(node.args[1:]), *nodes_in(list(node.kwargs.values()))}


def _reads_sizes(node: fx.Node) -> bool:
    """Whether a call reads of its first argument the sizes alone."""
    if node.target is getattr:
        return node.args[1] in ("shape", "ndim", "dtype", "device")
    return node.op != "call_module" and _name(node.target) in _OF_SIZES


def _name(target: Any) -> str:
    if isinstance(target, OpOverload):
        return str(target._opname)
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))


def _changes(node: fx.Node) -> bool:
    """Whether a call may change a value that others read."""
    if isinstance(node.target, OpOverload):
        return node.target._schema.is_mutable
    if node.op not in ("call_function", "call_method"):
        return False
    name = _name(node.target)
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or node.target in _CHANGING or bool({"out", "inplace"} & set(node.kwargs))
