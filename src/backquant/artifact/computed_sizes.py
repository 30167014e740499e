"""Numbers that a graph makes of sizes of tensors, and of nothing else: no tensor is among them."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from backquant.operators import overload

_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod)
_MOST = 64  # nodes that are looked at for one number


def is_size(value: Any) -> bool:
    """Whether a value of a graph is a node for an integer that is made of sizes.

    >>> from torch.fx import symbolic_trace
    >>> graph = symbolic_trace(lambda x, y: x.repeat(x.shape[0] // y.size(0), y.shape[1] * y)).graph
    >>> [repeat] = graph.find_nodes(op="call_method", target="repeat")
    >>> [is_size(arg) for arg in repeat.args]
    [False, True, False]
    """
    if not isinstance(value, Node):
        return False
    seen, pending = {value}, [value]
    while pending and len(seen) <= _MOST:
        node = pending.pop()
        if _reads_size(node):
            continue
        numbers = all(type(arg) is int or isinstance(arg, Node) for arg in node.args)
        if node.op != "call_function" or node.target not in _ARITHMETIC or not numbers:
            return False
        pending += [source for source in node.all_input_nodes if source not in seen]
        seen.update(node.all_input_nodes)
    return not pending


def _reads_size(node: Node) -> bool:
    """One size of a tensor."""
    if node.kwargs or len(node.args) != 2:
        return False
    source, place = node.args
    if not isinstance(source, Node) or type(place) is not int:
        return False
    if node.op == "call_method":
        return node.target == "size"
    if node.target is operator.getitem:
        is_shape = source.target is getattr and source.args[1:] == ("shape",)
        return is_shape or (source.target == "size" and len(source.args) == 1)
    return node.op == "call_function" and node.target is overload("sym_size")
