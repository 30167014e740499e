"""Operators that follow a convolution or linear layer become part of its kernel.

1. A clamp. The integers are the same: rounding is monotone, so a clamp before it (the kernel's ``hardtanh``)
   at values that stand for integers equals a clamp of integers after it.
2. An activation function. The reference model quantizes between the two; the joint kernel rounds once, behind
   the function. With a scale of the convolution of at most four times that of the result both agree within
   two integer steps (the functions' slopes are below 1.14).
3. An addition, of a 2d convolution that is the later of the operands, so that nothing has to be moved. With a
   scale of the convolution of at most twice that of the sum the two differ by one integer step at most.

In 2 and 3 values are not compared that the reference model cuts off at the ends of the range in between; the
record of such a kernel says that it rounds once.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from backquant.graph import contract, get_module
from backquant.graph.in_place import changes_argument
from backquant.lower.contracts import (
    FusedAttention,
    fused_nodes_are_there,
    kernels_are_recorded,
    merge_records,
)
from backquant.lower.kernels import elementwise
from backquant.lower.kernels.attention import attended, attended_whole
from backquant.lower.kernels.boundary import quantize
from backquant.lower.kernels.conv import OnednnConv
from backquant.lower.kernels.conv_add import ConvAddConfig, OnednnConvAdd
from backquant.lower.kernels.linear import OnednnLinear
from backquant.lower.kernels.lookup import Lookup, LookupConfig, clamp
from backquant.lower.kernels.postop import PostOp
from backquant.lower.kernels.shuffle import shuffle
from backquant.lower.machine import may_overwrite
from backquant.lower.rule import KernelUse
from backquant.operators import named, overload, spellings

_Kernel = OnednnConv | OnednnLinear

#: A kernel's node, what it calls for the follower, too, and what that reads besides.
_Joint = tuple[Node, torch.nn.Module, tuple[Node, ...]]
_ADDS = (elementwise.add, elementwise.add_relu)


@contract(ensures=[kernels_are_recorded])
def fuse_followers(
    graph_module: GraphModule, kernels: Sequence[KernelUse | None], records: dict[Node, int]
) -> list[KernelUse | None]:
    """Fuse each such operator; returns the kernels' records after it, ``None`` for one that was merged.

    ``records``: the position in ``kernels`` of the record of each kernel node. Each kernel module must be
    called once. The graph is edited in place. Cost: linear in the graph.
    """
    found = list(kernels)
    for rule in (_clamp, _lookup, _add):
        for node in list(graph_module.graph.nodes):
            joint = rule(graph_module, node)
            if joint is not None:
                source, made, more = joint
                graph_module.add_submodule(str(source.target), made)
                node.replace_all_uses_with(source)
                graph_module.graph.erase_node(node)
                source.args = (*source.args, *more)
                merge_records(found, records, (source, node), str(getattr(made, "name", "")))
    return found


def _kernel(graph_module: GraphModule, source: Any) -> Any:
    """The module that makes ``source``, if only one node reads that."""
    called = isinstance(source, Node) and source.op == "call_module" and len(source.users) == 1
    return get_module(graph_module, str(source.target)) if called else None


def _clamp(graph_module: GraphModule, node: Node) -> _Joint | None:
    """Rule 1."""
    if node.op != "call_function" or node.target is not clamp:
        return None
    arguments: tuple[Any, ...] = node.args
    source, low, high = arguments
    kernel = _kernel(graph_module, source)
    made = clamped(kernel, low, high) if isinstance(kernel, _Kernel) else None
    return None if made is None else (source, made, ())


def clamped(kernel: _Kernel, low: int, high: int) -> _Kernel | None:
    """``kernel`` with its integers clamped to ``[low, high]``; ``None`` if it does not admit that.

    >>> from backquant.lower.kernels.linear import LinearConfig
    >>> from backquant.lower.kernels.packed import WeightTensors
    >>> one, zero = torch.ones(1, 1, dtype=torch.int8), torch.zeros(1, dtype=torch.int64)
    >>> plain = OnednnLinear(
    ...     LinearConfig(1.0, 0, 0.5, 10, torch.uint8), WeightTensors(one, torch.ones(1), zero, None)
    ... )
    >>> clamped(plain, 10, 22).config.post_numbers
    (0.0, 6.0)
    """
    config = kernel.config
    if config.post_op not in ("none", "relu", "hardtanh"):
        return None
    bounds = [(b - config.out_zero_point) * config.out_scale for b in (low, high)]
    if config.post_op == "relu":
        bounds[0] = max(bounds[0], 0.0)
    elif config.post_op == "hardtanh":
        bounds = [max(bounds[0], config.post_numbers[0]), min(bounds[1], config.post_numbers[1])]
    if bounds[0] > bounds[1]:
        return None
    changed = dataclasses.replace(config, post_op="hardtanh", post_numbers=(bounds[0], bounds[1]))
    return _remade(kernel, changed)


def _lookup(graph_module: GraphModule, node: Node) -> _Joint | None:
    """Rule 2."""
    table = get_module(graph_module, str(node.target)) if node.op == "call_module" else None
    source: Any = node.args[0] if node.args else None
    kernel = _kernel(graph_module, source) if isinstance(table, Lookup) else None
    if not isinstance(table, Lookup) or not isinstance(kernel, _Kernel):
        return None
    made = with_function(kernel, table.config)
    return None if made is None else (source, made, ())


def with_function(kernel: _Kernel, table: LookupConfig) -> _Kernel | None:
    """``kernel`` with the function of ``table`` behind it; ``None`` if it does not admit that.

    >>> from backquant.lower.kernels.linear import LinearConfig
    >>> from backquant.lower.kernels.packed import WeightTensors
    >>> one, zero = torch.ones(1, 1, dtype=torch.int8), torch.zeros(1, dtype=torch.int64)
    >>> plain = OnednnLinear(
    ...     LinearConfig(1.0, 0, 0.5, 10, torch.uint8), WeightTensors(one, torch.ones(1), zero, None)
    ... )
    >>> with_function(plain, LookupConfig("silu", "swish", (), "", 0.25, 2)).name
    'onednn.qlinear_pointwise(swish, rounds once)'
    """
    config = kernel.config
    if config.post_op != "none" or config.out_dtype != torch.uint8 or table.post_op == "none":
        return None
    if not _admits(kernel, PostOp(table.post_op)) or config.out_scale > 4 * table.out_scale:
        return None
    names = ("post_op", "post_numbers", "post_algorithm", "out_scale", "out_zero_point")
    function: dict[str, Any] = {name: getattr(table, name) for name in names}
    changed = dataclasses.replace(config, rounds_once=True, **function)
    return _remade(kernel, changed)


def _remade(kernel: _Kernel, config: Any) -> _Kernel:
    """``kernel`` with another configuration."""
    return type(kernel)(config, kernel.tensors()).train(kernel.training)


def _admits(kernel: _Kernel, post_op: PostOp) -> bool:
    if isinstance(kernel, OnednnLinear) or kernel.is_linear:
        return post_op.admitted_by_linear
    return post_op.applied_by_conv(len(kernel.config.stride))


def _add(graph_module: GraphModule, node: Node) -> _Joint | None:
    """Rule 3."""
    if node.op != "call_function" or node.target not in _ADDS or node.args[0] is node.args[3]:
        return None
    arguments: tuple[Any, ...] = node.args  # nodes and literals
    conv, other, (out_scale, out_zero_point) = arguments[0], arguments[3], arguments[6:8]
    other_scale, other_zero_point = arguments[4:6]
    if conv < other:
        conv, other = other, conv
        other_scale, other_zero_point = arguments[1:3]
    kernel = _kernel(graph_module, conv)
    if not isinstance(kernel, OnednnConv):
        return None
    c = kernel.config
    plain = c.post_op == "none" and c.out_dtype == torch.uint8 and len(c.stride) == 2
    if not plain or c.out_scale > 2 * out_scale:
        return None
    names = ("stride", "padding", "dilation", "groups", "x_scale", "x_zero_point")
    own: dict[str, Any] = {name: getattr(c, name) for name in names}
    config = ConvAddConfig(
        **own,
        other_scale=other_scale,
        other_zero_point=other_zero_point,
        out_scale=out_scale,
        out_zero_point=out_zero_point,
        relu=node.target is elementwise.add_relu,
        overwrite=conv.args[0] is not other and may_overwrite(graph_module, other, conv, node),
        rounds_once=True,
    )
    return conv, OnednnConvAdd(config, kernel.tensors()).train(kernel.training), (other,)


# Attention that is computed in float, and whose result is quantized next, becomes one kernel.
#
# It is written whole (``F.scaled_dot_product_attention``) or as two products with a softmax between them,
# what happens to the scores included. Which sizes and layouts the library of kernels takes is seen when the
# model runs: elsewhere the kernel calls the operators that were here. What only moves values before they
# are quantized then moves integers.

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


def _called(graph_module: GraphModule, node: object) -> Any:
    """The module that ``node`` calls for one reader, or None."""
    if not isinstance(node, Node) or node.op != "call_module" or len(node.users) != 1:
        return None
    return graph_module.get_submodule(str(node.target))


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
    node: Node, longest: int, branches: int
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


# Reshape, transposition and reshape of a channel shuffle become one kernel.
#
# Which sizes they are is known when the model runs: the kernel does the same for all of them.

_SHUFFLE_RESHAPES: tuple[Any, ...] = spellings("view", "reshape")
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
    if node.op not in ("call_method", "call_function") or node.target not in _SHUFFLE_RESHAPES:
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
