"""Outputs that a model joins last (boxes beside scores): each part has an accuracy of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from backquant.graph import returning
from backquant.operators.index import find

_JOINS = ("cat", "stack")
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
    """The outputs, by position among all that are returned, that are joins or a join's rounded values.

    ``run``: calls a graph module that returns what these join. It is called only where there are any.

    >>> joined = fx.symbolic_trace(lambda x, y: (x + 1, torch.cat([x, y], 1)))
    >>> joined_outputs(joined, lambda module: module(torch.ones(1, 2), torch.ones(1, 3)))
    {1: JoinedOutput(node='cat', dim=1, sizes=(2, 3))}
    >>> joined = fx.symbolic_trace(lambda x: torch.cat([torch.zeros(0), x], 1))
    >>> joined_outputs(joined, lambda module: module(torch.ones(1, 2)))
    {0: JoinedOutput(node='cat', dim=1, sizes=(0, 2))}
    """
    joins: dict[int, tuple[fx.Node, list[fx.Node], int]] = {}
    for place, leaf in enumerate(tree_leaves(module.graph.output_node().args[0])):
        node = _unrounded(leaf) if isinstance(leaf, fx.Node) else None
        if node is None or _name(node) not in _JOINS:
            continue
        read = node.args[0] if node.args else node.kwargs.get("tensors")
        dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
        if isinstance(read, (list, tuple)) and type(dim) is int:
            joins[place] = node, [part for part in read if isinstance(part, fx.Node)], dim
    if not joins:
        return {}
    with torch.no_grad():
        made = run(returning(module, [parts for _, parts, _ in joins.values()]))
    return {
        place: JoinedOutput(node.name, dim, tuple(_size(node, part, dim) for part in parts))
        for (place, (node, _, dim)), parts in zip(joins.items(), made, strict=True)
    }


def _size(node: fx.Node, part: torch.Tensor, dim: int) -> int:
    """Along ``dim``. ``cat`` takes parts of shape (0,) beside those of any rank: caches begin with them."""
    if _name(node) == "stack":
        return 1
    return 0 if part.shape == (0,) else int(part.shape[dim])


def _name(node: fx.Node) -> str:
    known = find(node.target)
    return "" if known is None else known.name


def _unrounded(node: fx.Node) -> fx.Node:
    while str(node.target).startswith(_ROUNDINGS) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
