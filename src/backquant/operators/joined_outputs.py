"""Outputs that a model joins last (boxes beside scores): each part has an accuracy of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from backquant.graph import returning
from backquant.operators.index import find, find_root
from backquant.operators.operator import Operator

_JOINS = ("cat", "stack")
#: Families of operators that leave each part at its place, where sizes stay.
_OF_PLACES = ("elementwise", "activation", "fixed_qparams", "pooling", "dropout")
_ROUNDINGS = ("quantized_decomposed.", "backquant.quantize_rounded")


@dataclass(frozen=True)
class JoinedOutput:
    """``node`` joins parts of these ``sizes`` along ``dim``.

    >>> [part.shape[1] for part in JoinedOutput("cat", 1, (2, 3)).parts(torch.ones(4, 5))]
    [2, 3]
    """

    node: str
    dim: int
    sizes: tuple[int, ...]

    def parts(self, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The parts of a tensor that this join made."""
        parts: tuple[torch.Tensor, ...] = torch.split(output, list(self.sizes), self.dim)
        return parts


def joined_outputs(
    module: fx.GraphModule, run: Callable[[fx.GraphModule], Any]
) -> Mapping[int, JoinedOutput]:
    """The outputs, by position among all that are returned, that are joins, or what operators that keep each
    part at its place (roundings, ReLU, products, pooling) make of one.

    ``run``: calls a graph module that returns what these join. It is called only where there are any.

    >>> joined = fx.symbolic_trace(lambda x, y: (x + 1, torch.cat([x, y], 1)))
    >>> joined_outputs(joined, lambda module: module(torch.ones(1, 2), torch.ones(1, 3)))
    {1: JoinedOutput(node='cat', dim=1, sizes=(2, 3))}
    >>> joined = fx.symbolic_trace(lambda x: torch.relu(torch.cat([x, x], 1)) * 2)
    >>> joined_outputs(joined, lambda module: module(torch.ones(1, 2)))
    {0: JoinedOutput(node='cat', dim=1, sizes=(2, 2))}
    >>> joined = fx.symbolic_trace(lambda x: torch.cat([torch.zeros(0), x], 1))
    >>> joined_outputs(joined, lambda module: module(torch.ones(1, 2)))
    {0: JoinedOutput(node='cat', dim=1, sizes=(0, 2))}
    """
    joins: dict[int, tuple[fx.Node, int]] = {}
    returned: dict[int, list[fx.Node]] = {}
    for place, leaf in enumerate(tree_leaves(module.graph.output_node().args[0])):
        node = _join(module, leaf, set()) if isinstance(leaf, fx.Node) else None
        if node is None:
            continue
        read = node.args[0] if node.args else node.kwargs.get("tensors")
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        if isinstance(read, (list, tuple)) and type(dim) is int:
            joins[place] = node, dim
            parts = [part for part in read if isinstance(part, fx.Node)]
            returned[place] = [leaf, node, *parts]
    if not joins:
        return {}
    with torch.no_grad():
        made = run(returning(module, list(returned.values())))
    return {
        place: JoinedOutput(node.name, dim, tuple(_size(node, part, dim) for part in parts))
        for (place, (node, dim)), (output, whole, *parts) in zip(joins.items(), made, strict=True)
        if output.dim() == whole.dim() and output.shape[dim] == whole.shape[dim]
    }


def _join(module: fx.GraphModule, node: fx.Node, seen: set[fx.Node]) -> fx.Node | None:
    """The join whose parts stand in ``node`` at their places."""
    known = _operator(module, node)
    if node in seen or (known is not None and known.name in _JOINS):
        return None if node in seen else node
    seen.add(node)
    keeps = known is not None and known.keeps_places and known.family in _OF_PLACES
    if not keeps and not str(node.target).startswith(_ROUNDINGS):
        return None
    found = (_join(module, value, seen) for value in node.all_input_nodes)
    return next(filter(None, found), None)


def _size(node: fx.Node, part: torch.Tensor, dim: int) -> int:
    """Along ``dim``. ``cat`` takes parts of shape (0,) beside those of any rank: caches begin with them."""
    if (known := find(node.target)) is not None and known.name == "stack":
        return 1
    return 0 if part.shape == (0,) else int(part.shape[dim])


def _operator(module: fx.GraphModule, node: fx.Node) -> Operator | None:
    if node.op == "call_module":
        return find_root(type(module.get_submodule(str(node.target))))
    return find(node.target)
