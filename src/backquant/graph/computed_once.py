"""Products that a model computes twice, of the same values with the same weights, computed once.

A spiking network calls a convolution at each step on the same image. A runtime finds such calls and computes
them once, under one of their names: the others seemed to have no kernel. Here they are one operator from the
start, on all engines.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from backquant.graph.mutation import changes_argument, is_view
from backquant.graph.provenance import Scope
from backquant.graph.queries import GraphIndex

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
_PURE = ("torch.", "_operator", "operator", "builtins", "_VariableFunctions")
_RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "poisson", "exponential")


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
    values = _Values(module, index)
    first: dict[Any, fx.Node] = {}
    count = 0
    for node in list(module.graph.nodes):
        number = values.of(node)
        if (
            not _is_product(node, index)
            or node.target in kept
            or type(index.module_of(node)) in kept
        ):
            continue
        scope = scopes.get(node.name)
        one = first.setdefault((number, scope.path if scope else ""), node)
        if one is node:
            continue
        above = node.all_input_nodes
        node.replace_all_uses_with(one)
        module.graph.erase_node(node)
        _drop(above, index)
        count += 1
    if count:
        module.recompile()
    return count


class _Values:
    """Numbers for what nodes compute: equal numbers, equal values."""

    def __init__(self, module: fx.GraphModule, index: GraphIndex) -> None:
        self._index = index
        self._written = _written(module.graph, index)
        self._numbers: dict[fx.Node, int] = {}
        self._known: dict[Any, int] = {}

    def of(self, node: fx.Node) -> int:
        """The number of ``node``; what it reads has one."""
        number = self._numbers[node] = self._number(node)
        return number

    def _number(self, node: fx.Node) -> int:
        key: Any = node
        changes = node in self._written or not self._written.isdisjoint(node.all_input_nodes)
        if not changes and _is_pure(node, self._index):
            read = fx.node.map_arg((node.args, node.kwargs), lambda a: _Value(self._numbers[a]))
            key = (node.op, node.target, _plain(read))
        return self._known.setdefault(key, len(self._known))


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


def _plain(read: Any) -> str:
    """Arguments as words, tensors by their identity."""
    return repr(torch.utils._pytree.tree_map_only(torch.Tensor, id, read))


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
        return type(called) in _MODULES and not _hooks(called)
    if node.op not in ("call_function", "call_method") or changes_argument(node, called):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        seeded = torch.Tag.nondeterministic_seeded in node.target.tags
        return node.target.namespace == "aten" and not seeded and not node.target._schema.is_mutable
    name = str(getattr(node.target, "__name__", node.target))
    if any(word in name for word in _RANDOM) or name.startswith("empty"):
        return False
    home = str(getattr(node.target, "__module__", None) or "torch.")
    return node.op == "call_method" or f"{home}.".startswith(_PURE)


def _hooks(module: nn.Module | None) -> bool:
    return bool(
        getattr(module, "_forward_hooks", None) or getattr(module, "_forward_pre_hooks", None)
    )


def _drop(nodes: list[fx.Node], index: GraphIndex) -> None:
    """Erase what nobody reads any more."""
    while nodes:
        node = nodes.pop()
        if not node.users and not node._erased and _is_pure(node, index):
            nodes += node.all_input_nodes
            node.graph.erase_node(node)
