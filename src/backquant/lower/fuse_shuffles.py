"""Reshape, transposition and reshape of a channel shuffle become one kernel.

Which sizes they are is known when the model runs: the kernel does the same for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Node

from backquant.graph import contract
from backquant.lower.contracts import kernels_are_recorded, merge_records
from backquant.lower.kernels.shuffle import shuffle
from backquant.lower.rule import KernelUse
from backquant.operators import spellings

_RESHAPES: tuple[Any, ...] = spellings("view", "reshape")
_TRANSPOSES: tuple[Any, ...] = spellings("transpose")


@contract(ensures=[kernels_are_recorded])
def fuse_shuffles(
    graph_module: GraphModule, kernels: Sequence[KernelUse | None], records: dict[Node, int]
) -> list[KernelUse | None]:
    """Fuse each such shuffle; returns the kernels' records after it, ``None`` for one that was merged.

    ``records``: the position in ``kernels`` of the record of each kernel node; a shuffle of floats has
    none, and stays. The graph is edited in place. Cost: linear in the graph.
    """
    found = list(kernels)
    for node in list(graph_module.graph.nodes):
        chain = _chain(node)
        if chain is not None and all(part in records for part in chain):
            _join(graph_module, chain, found, records)
    return found


def _chain(node: Node) -> list[Node] | None:
    """The nodes of a shuffle that starts with ``node``."""
    first = _sizes(node)
    if first is None or len(first) != 5:
        return None
    transpose = _only_user(node)
    if transpose is None or not _swaps(transpose):
        return None
    chain, user = [node, transpose], _only_user(transpose)
    if user is not None and user.op == "call_method" and user.target == "contiguous":
        chain, user = [*chain, user], _only_user(user)
    last = None if user is None else _sizes(user)
    return [*chain, user] if user is not None and last is not None and len(last) == 4 else None


def _only_user(node: Node) -> Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].args[:1] == (node,) else None


def _swaps(node: Node) -> bool:
    called = node.op in ("call_method", "call_function") and node.target in _TRANSPOSES
    return called and not node.kwargs and node.args[1:] in ((1, 2), (2, 1))


def _sizes(node: Node) -> tuple[Any, ...] | None:
    """The sizes that ``node`` reshapes to, written one by one or as a list."""
    if node.op not in ("call_method", "call_function") or node.target not in _RESHAPES:
        return None
    if node.kwargs or len(node.args) < 2:
        return None
    sizes = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], (list, tuple)):
        sizes = tuple(sizes[0])
    return sizes if all(isinstance(size, (int, Node)) for size in sizes) else None


def _join(
    graph_module: GraphModule,
    chain: list[Node],
    found: list[KernelUse | None],
    records: dict[Node, int],
) -> None:
    first, last = chain[0], chain[-1]
    with graph_module.graph.inserting_before(last):
        args = (first.args[0], _sizes(first), _sizes(last))
        joint = graph_module.graph.call_function(shuffle, args)
    last.replace_all_uses_with(joint)
    for node in chain[1:]:
        merge_records(found, records, (first, node), "aten.reshape(shuffle)")
    records[joint] = records.pop(first)
    for node in reversed(chain):
        graph_module.graph.erase_node(node)
