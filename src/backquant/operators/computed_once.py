"""Products that a model computes twice, of the same values with the same weights, computed once.

A spiking network calls a convolution at each step on the same image. A runtime finds such calls and
computes them once, under one of their names: the others seemed to have no kernel. Here they are one
operator from the start, on all engines.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from backquant.graph import GraphIndex, Scope
from backquant.graph.folding import is_plain, is_random
from backquant.graph.in_place import changes_argument, is_view

_MODULES = (
    *(nn.Linear, nn.Bilinear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)
_FUNCTIONS: frozenset[Any] = frozenset(
    {
        *(F.linear, F.conv1d, F.conv2d, F.conv3d, torch.matmul, torch.bmm, torch.mm),
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, operator.matmul),
        *("matmul", "bmm", "mm"),
    }
)


def computed_once(
    module: fx.GraphModule, scopes: Mapping[str, Scope], kept: Collection[Any] = ()
) -> int:
    """Let one product stand for all that are equal to it and in the same module, in place; how many are gone.
    Operators in ``kept`` stay.

    1. Equal are calls of one layer, or of one function, with equal arguments; arguments are equal that are
       computed alike from the same values by operators that draw no random numbers and change nothing.
    2. What is written to at some place is not shared, and nothing is that reads it.

    >>> module = fx.symbolic_trace(lambda x, y: torch.matmul(x, y).relu() + torch.matmul(x, y).sin())
    >>> computed_once(module, {}), [node.name for node in module.graph.nodes]
    (1, ['x', 'y', 'matmul', 'relu', 'sin', 'add', 'output'])
    """
    index = GraphIndex(module)
    written = _written(module.graph, index)
    numbers: dict[fx.Node, int] = {}  # of what nodes compute: equal numbers, equal values
    known: dict[Any, int] = {}
    first: dict[Any, fx.Node] = {}
    count = 0
    for node in list(module.graph.nodes):
        above, key = node.all_input_nodes, cast(Any, node)
        if written.isdisjoint((node, *above)) and _is_pure(node, index):
            read = fx.node.map_arg((node.args, node.kwargs), lambda a: _Value(numbers[a]))
            # as words, tensors by their identity
            key = (node.op, node.target, repr(tree_map_only(torch.Tensor, id, read)))
        numbers[node] = known.setdefault(key, len(known))
        is_kept = node.target in kept or type(index.module_of(node)) in kept
        if is_kept or not _is_product(node, index):
            continue
        scope = scopes.get(node.name)
        one = first.setdefault((numbers[node], scope.path if scope else ""), node)
        if one is not node:
            node.replace_all_uses_with(one)
            module.graph.erase_node(node)
            _drop(above, index)
            count += 1
    if count:
        module.recompile()
    return count


def _written(graph: fx.Graph, index: GraphIndex) -> set[fx.Node]:
    """What is written to at some place: by itself, or in memory that it shares with such a value."""
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        called = index.module_of(node)
        if changes_argument(node, called) or (node in found and is_view(node, called)):
            found.update(node.all_input_nodes)
    targets = {node.target for node in found if node.op == "get_attr"}
    for node in graph.nodes:
        called = index.module_of(node)
        shares = is_view(node, called) or changes_argument(node, called)
        if (node.op == "get_attr" and node.target in targets) or (
            shares and not found.isdisjoint(node.all_input_nodes)
        ):
            found.add(node)
    return found


class _Value(int):
    """The number of what a node reads, told apart from numbers that are written out."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _is_product(node: fx.Node, index: GraphIndex) -> bool:
    if node.op == "call_module":
        return _is_pure(node, index)
    return node.op in ("call_function", "call_method") and node.target in _FUNCTIONS


def _is_pure(node: fx.Node, index: GraphIndex) -> bool:
    """Whether the node gives the same value for the same arguments, and does nothing else."""
    called = index.module_of(node)
    if node.op == "get_attr":
        return True
    if node.op == "call_module":
        has_hooks = called is not None and (called._forward_hooks or called._forward_pre_hooks)
        return type(called) in _MODULES and not has_hooks
    if node.op not in ("call_function", "call_method") or changes_argument(node, called):
        return False
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        return False
    name = str(getattr(node.target, "__name__", node.target))
    is_known = not is_random(name) if node.op == "call_method" else is_plain(node.target)
    return is_known and not name.startswith("empty")


def _drop(nodes: list[fx.Node], index: GraphIndex) -> None:
    """Erase what nobody reads any more."""
    while nodes:
        node = nodes.pop()
        if not node.users and not node._erased and _is_pure(node, index):
            nodes += node.all_input_nodes
            node.graph.erase_node(node)
