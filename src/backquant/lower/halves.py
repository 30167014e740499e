"""Operators that only move values (``view``, ``transpose``) between two casts to float16 or bfloat16 move
the narrow values.

They are rounded already: to widen them for the operator and to round them again behind it changes nothing.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from backquant.lower.dynamic import static_cast
from backquant.operators import moves_values


def move_halves(graph: Graph) -> None:
    """Take the casts around such operators out of ``graph``."""
    narrow: dict[Node, torch.dtype] = {}
    for node in list(graph.nodes):
        cast = static_cast(node)
        if cast is None:
            continue
        moved, dtype = cast
        widened = _only_source(moved)
        source = None if widened is None else static_cast(widened)
        if widened is None or source is None or narrow.get(source[0]) != dtype:
            narrow[node] = dtype
            continue
        moved.replace_input_with(widened, source[0])
        node.replace_all_uses_with(moved)
        narrow[moved] = dtype
        for erased in (node, widened):
            if not erased.users:
                graph.erase_node(erased)


def _only_source(node: Node) -> Node | None:
    """The one tensor that ``node`` moves the values of, for one reader."""
    sources = node.all_input_nodes
    is_one = (
        len(sources) == 1 and len(node.users) == 1 and node.op in ("call_function", "call_method")
    )
    return sources[0] if is_one and moves_values(node.target) else None
