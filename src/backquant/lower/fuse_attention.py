"""Attention that is computed in float, and whose result is quantized next, becomes one kernel.

It is written whole (``F.scaled_dot_product_attention``) or as two products with a softmax between them, what
happens to the scores included. Which sizes and layouts the library of kernels takes is seen when the model
runs: elsewhere the kernel calls the operators that were here. What only moves values before they are
quantized then moves integers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from backquant.graph import contract
from backquant.graph.mutation import changes_argument
from backquant.lower.contracts import FusedAttention, fused_nodes_are_there
from backquant.lower.kernels.attention import attended, attended_whole
from backquant.lower.kernels.boundary import quantize
from backquant.operators import named, overload

_MOVES: frozenset[Any] = frozenset(
    spelling
    for name in ("transpose", "permute", "contiguous", "reshape", "flatten")
    for spelling in named(name).spellings
)
_RESHAPES = frozenset((*named("view").spellings, *named("reshape").spellings))
_PRODUCTS = frozenset(named("matmul").spellings)
_SOFTMAX = frozenset(named("softmax").spellings)
_WHOLE = frozenset(named("scaled_dot_product_attention").spellings)
_ARGUMENTS = (
    *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
)
# with whether both sides may be the scores
_WORDS: dict[Any, tuple[str, bool]] = {
    **dict.fromkeys(named("add").spellings, ("add", True)),
    **dict.fromkeys(named("mul").spellings, ("mul", True)),
    **dict.fromkeys(
        (operator.truediv, operator.itruediv, torch.div, "div", "div_", overload("div", "Tensor")),
        ("div", False),
    ),
}
_FILLS = frozenset(
    ("masked_fill", "masked_fill_", torch.masked_fill, overload("masked_fill", "Scalar"))
)
_LONGEST = 16  # operators between the first product and the softmax
_BRANCHES = 4  # of which so many have two tensors


@dataclass(frozen=True)
class _Core:
    """``kernel`` and its arguments but the last two; ``nodes``: the operators that it computes, in order."""

    kernel: Any
    args: tuple[Any, ...]
    nodes: tuple[Node, ...]


@contract(ensures=[fused_nodes_are_there])
def fuse_attention(graph_module: GraphModule) -> list[FusedAttention]:
    """Fuse each such attention; the graph is edited in place. Cost: linear in the graph."""
    graph = graph_module.graph
    changes = _changes_before(graph_module)
    made: list[FusedAttention] = []
    for node in list(graph.nodes):
        if not _rounds(node):
            continue
        moves, value = _moved(node.args[0])
        core = _core(graph_module, value)
        if core is None or _is_written_between(core.nodes, changes):
            continue
        last, args = core.nodes[-1], (*core.args, *node.args[1:3])
        with graph.inserting_before(last):
            joint = graph.create_node(
                "call_function", core.kernel, args, {}, f"{last.name}_lowered"
            )
        last.replace_all_uses_with(joint)
        node.replace_all_uses_with(node.args[0])
        for part in (node, *reversed(core.nodes)):
            graph.erase_node(part)
        names = tuple(part.name for part in core.nodes)
        made.append(FusedAttention(joint, names, tuple(move.name for move in moves)))
    return made


def _changes_before(graph_module: GraphModule) -> dict[Node, int]:
    """How many calls up to each node change an argument in place."""
    found: dict[Node, int] = {}
    count = 0
    for node in graph_module.graph.nodes:
        called = graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None
        count += changes_argument(node, called)
        found[node] = count
    return found


def _is_written_between(core: tuple[Node, ...], changes: dict[Node, int]) -> bool:
    """Whether a call that is no part of attention may change what it reads, between its first and last."""
    own = sum(changes_argument(node) for node in core[1:] if node.op != "call_module")
    return changes[core[-1]] - changes[core[0]] != own


def _rounds(node: Node) -> bool:
    """Whether ``node`` rounds a value to all integers of 8 bits, by qparams that are written in the graph."""
    whole = node.target is quantize and not node.kwargs and node.args[3:] == (0, 255, torch.uint8)
    return whole and all(isinstance(number, (int, float)) for number in node.args[1:3])


def _moved(value: Any) -> tuple[list[Node], Any]:
    """The operators up to ``value`` that only move values for one reader, and what they move."""
    moves: list[Node] = []
    while _is_read_once(value) and value.target in _MOVES and value.args:
        moves.append(value)
        value = value.args[0]
    return moves, value


def _is_read_once(value: Any) -> bool:
    called = isinstance(value, Node) and value.op in ("call_function", "call_method")
    return called and len(value.users) == 1


def _core(graph_module: GraphModule, value: Any) -> _Core | None:
    """The attention that gives ``value``."""
    if not _is_read_once(value):
        return None
    return _whole(value) if value.target in _WHOLE else _apart(graph_module, value)


def _whole(node: Node) -> _Core | None:
    given = {**dict(zip(_ARGUMENTS, node.args, strict=False)), **node.kwargs}
    q, k, v, mask, dropout, causal, scale, grouped = (given.get(name) for name in _ARGUMENTS)
    tensors = all(isinstance(x, Node) for x in (q, k, v, *(() if mask is None else (mask,))))
    # a mask and whether it is causal may be arguments of the model
    flags = (isinstance(causal, Node) or causal in (None, False, True)) and grouped in (
        None,
        False,
        True,
    )
    if not tensors or not flags or dropout or not (scale is None or type(scale) in (int, float)):
        return None
    causal = causal if isinstance(causal, Node) else bool(causal)
    args = (q, k, v, mask, causal, scale, bool(grouped))
    return _Core(attended_whole, args, (node,))


def _apart(graph_module: GraphModule, last: Node) -> _Core | None:
    factors = _factors(last)
    if factors is None:
        return None
    dropped, softmax = _undropped(graph_module, factors[0])
    scores = _softened(graph_module, softmax)
    found = None if scores is None else _between(scores, _LONGEST, _BRANCHES)
    if found is None:
        return None
    nodes, steps = found
    first = _factors(nodes[0])
    assert first is not None
    scaled = _scaled(first[0])
    if scaled is not None:
        before, word, number = scaled
        steps = [(f"queries_{word}", number), *steps]
        first, nodes = (before, first[1]), (first[0], *nodes)
    args = (*first, factors[1], tuple(steps))
    return _Core(attended, args, (*nodes, softmax, *dropped, last))


def _scaled(queries: Any) -> tuple[Any, str, float] | None:
    """What ``queries`` are times a number, or divided by it, for one reader."""
    if not _is_read_once(queries) or changes_argument(queries):
        return None
    for source, word, number in _readings(queries):
        if word in ("mul", "div") and isinstance(source, Node) and type(number) in (int, float):
            return source, word, number
    return None


def _called(graph_module: GraphModule, node: Any) -> Any:
    """The module that ``node`` calls for one reader, or None."""
    called = isinstance(node, Node) and node.op == "call_module" and len(node.users) == 1
    return graph_module.get_submodule(str(node.target)) if called else None


def _undropped(graph_module: GraphModule, value: Any) -> tuple[list[Node], Any]:
    """Dropout up to ``value``, which does nothing in inference, and what it reads."""
    module = _called(graph_module, value)
    is_off = isinstance(module, torch.nn.Dropout) and not module.training
    return ([value], value.args[0]) if is_off and len(value.args) == 1 else ([], value)


def _factors(node: Node) -> tuple[Any, Any] | None:
    """Both sides of a product."""
    two = node.target in _PRODUCTS and len(node.args) == 2 and not node.kwargs
    return (node.args[0], node.args[1]) if two and len(node.all_input_nodes) == 2 else None


def _softened(graph_module: GraphModule, softmax: Any) -> Node | None:
    """What a softmax over the last dimension reads."""
    module = _called(graph_module, softmax)
    if isinstance(module, torch.nn.Softmax):
        value = softmax.args[0] if len(softmax.args) == 1 else None
        return value if module.dim == -1 and isinstance(value, Node) else None
    if not _is_read_once(softmax) or softmax.target not in _SOFTMAX or len(softmax.args) > 2:
        return None
    given = {**dict(zip(("input", "dim"), softmax.args, strict=False)), **softmax.kwargs}
    known = set(given) <= {"input", "dim", "_stacklevel", "dtype"}
    plain = known and given.get("dtype") in (None, torch.float32) and given.get("dim") == -1
    value = given.get("input")
    return value if plain and isinstance(value, Node) else None


def _between(
    node: Any, longest: int, branches: int
) -> tuple[tuple[Node, ...], list[tuple[str, Any]]] | None:
    """The operators from a product to ``node``, and what those behind it do. Looks at a bounded number."""
    if not _is_read_once(node) or longest == 0 or branches < 0:
        return None
    if node.target in _PRODUCTS:
        return ((node,), []) if _factors(node) is not None else None
    readings = list(_readings(node))
    tensors = sum(isinstance(given, Node) for _, _, given in readings)
    for source, word, given in readings:
        found = _between(source, longest - 1, branches - (tensors > 1))
        if found is not None:
            return (*found[0], node), [*found[1], (word, given)]
    return None


def _readings(node: Node) -> Iterator[tuple[Any, str, Any]]:
    """The values that may be the scores which ``node`` reads, each with the word for what it does and what
    that takes."""
    if node.kwargs or len(node.args) < 2:
        return
    source, given = node.args[:2]
    if node.target in _RESHAPES:
        sizes = given if isinstance(given, (list, tuple)) else node.args[1:]
        if all(isinstance(size, (int, Node)) for size in sizes):
            yield source, "reshape", tuple(sizes)
    elif node.target in _FILLS and len(node.args) == 3:
        if isinstance(given, Node) and isinstance(node.args[2], (int, float)):
            yield source, "masked_fill", (given, node.args[2])
    elif node.target in _WORDS and len(node.args) == 2:
        word, either = _WORDS[node.target]
        if isinstance(given, (int, float, Node)):
            yield source, word, given
        if either and isinstance(source, (int, float, Node)):
            yield given, word, source
