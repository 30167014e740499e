"""Whether two graph modules compute the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves


def alike(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Whether both make the same calls with the same tensors, whatever their nodes are called.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> alike(fx.symbolic_trace(model), fx.symbolic_trace(model))
    True
    >>> alike(fx.symbolic_trace(model), fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU())))
    False
    """
    nodes = list(one.graph.nodes), list(other.graph.nodes)
    if len(nodes[0]) != len(nodes[1]):
        return False
    places = [{node: place for place, node in enumerate(every)} for every in nodes]
    for pair in zip(*nodes, strict=True):
        first, second = (
            _call(node, of, module)
            for node, of, module in zip(pair, places, (one, other), strict=True)
        )
        if first != second:
            return False
    return _same_tensors(one.state_dict(), other.state_dict())


def _call(node: fx.Node, places: dict[fx.Node, int], module: fx.GraphModule) -> tuple[Any, ...]:
    """What a node does; values that it reads are named by their place."""
    read = fx.node.map_arg((node.args, node.kwargs), lambda arg: ("value", places[arg]))
    target: Any = node.target
    if node.op in ("placeholder", "output"):
        target = ""
    if node.op == "call_module":
        target = (target, repr(module.get_submodule(str(target))))
    return node.op, target, _plain(read)


def _plain(read: Any) -> str:
    """Arguments as words: tensors by their identity."""
    leaves = tree_leaves(read)
    tensors = [id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return f"{tensors}" if tensors else repr(read)


def _same_tensors(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )
