"""Attention as one operator: ``backquant::attention``, from queries, keys and values to integers.

``join_attention`` finds it in an exported graph, whole (``scaled_dot_product_attention``) or taken apart (two
products with a softmax between them), where its result is rounded to integers next. What is added to the
scores (a bias, a mask) and the rounding of scores by the model itself go into the operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from backquant.lower.kernels.attention import MOST_ADDED, MOST_KEYS, added_shape
from backquant.runtime.compiled.operators import LIBRARY

LIBRARY.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor[] added, float scale, float score_scale, "
    "int score_zero_point, float out_scale, int out_zero_point) -> Tensor"
)
attention = torch.ops.backquant.attention.default

Node = Any  # an fx.Node; typed Any because matching inspects arguments of any kind

_ATEN = torch.ops.aten
_MOVES = (
    *(_ATEN.transpose.int, _ATEN.permute.default, _ATEN.contiguous.default, _ATEN.clone.default),
    *(_ATEN.reshape.default, _ATEN.view.default, _ATEN.flatten.using_ints),
)
_RESHAPES = (_ATEN.reshape.default, _ATEN.view.default)
_QUANTIZE = "quantized_decomposed.quantize_per_tensor.default"
_DEQUANTIZE = "quantized_decomposed.dequantize_per_tensor.default"


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    added: Sequence[torch.Tensor],
    scale: float,
    score_scale: float,
    score_zero_point: int,
    out_scale: float,
    out_zero_point: int,
) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if score_scale:
        steps = torch.round(scores * (1.0 / score_scale)) + score_zero_point
        scores = (steps.clamp(0, 255) - score_zero_point) * score_scale
    for term in added:
        scores = scores + term.repeat(scores.shape[0] // term.shape[0], 1, 1, 1)
    found = torch.matmul(torch.softmax(scores, -1), v)
    steps = torch.round(found * (1.0 / out_scale)) + out_zero_point
    integers = steps.clamp(0, 255).to(torch.uint8)
    return integers.transpose(1, 2).contiguous().transpose(1, 2)


def _shape(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:  # noqa: ARG001
    batch, heads, queries = q.shape[:3]
    return q.new_empty((batch, queries, heads, v.shape[-1]), dtype=torch.uint8).transpose(1, 2)


LIBRARY.impl("attention", _attention, "CPU")
torch.library.register_fake("backquant::attention", _shape, lib=LIBRARY)


def join_attention(graph: fx.Graph) -> int:
    """Put the operator where an exported graph computes attention and rounds it; how often.

    Linear in the number of nodes.
    """
    _without_checks(graph)
    found = 0
    for node in list(graph.nodes):
        site = _site(node)
        if site is not None:
            site.replace(node)
            found += 1
    if found:
        graph.eliminate_dead_code()
        graph.lint()
    return found


def _without_checks(graph: fx.Graph) -> None:
    """Takes away checks of what is known, and conversions to the dtype that a value has."""
    for node in list(graph.nodes):
        if node.target is _ATEN._assert_tensor_metadata.default:
            graph.erase_node(node)
    for node in list(graph.nodes):
        if node.target is _ATEN.to.dtype and len(node.args) == 2:
            source = node.args[0]
            if source.meta["val"].dtype == node.args[1]:
                node.replace_all_uses_with(source)
                graph.erase_node(node)


def _is(node: object, name: str) -> bool:
    return isinstance(node, fx.Node) and str(node.target) == name


def _value(node: Node) -> Any:
    return node.meta["val"]


def _only(node: object) -> bool:
    return isinstance(node, fx.Node) and len(node.users) == 1


@dataclass(frozen=True)
class _Scores:
    """What is between the softmax and the first product, from the outside in."""

    product: Node
    scale: float = 1.0
    rounding: tuple[float, int] = (0.0, 0)
    added: tuple[tuple[Node, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class _Site:
    """``core`` gives the result; ``moves``: between it and the quantize node, the last first."""

    q: Node
    k: Node
    v: Node
    transposed: bool
    scores: _Scores
    core: Node
    moves: list[Node] = field(default_factory=list)

    def replace(self, quantize: Node) -> None:
        graph = quantize.graph
        with graph.inserting_before(quantize):
            rank = _value(self.v).dim()
            k = _call(graph, _ATEN.transpose.int, self.k, -2, -1) if self.transposed else self.k
            q, k, v = (
                node if rank == 4 else _call(graph, _ATEN.unsqueeze.default, node, 1)
                for node in (self.q, k, self.v)
            )
            added = [
                _call(graph, _ATEN.reshape.default, node, list(shape))
                for node, shape in self.scores.added
            ]
            numbers = (self.scores.scale, *self.scores.rounding, *quantize.args[1:3])
            made = _call(graph, attention, q, k, v, added, *numbers)
            if rank == 3:
                made = _call(graph, _ATEN.squeeze.dim, made, 1)
            for move in reversed(self.moves):
                made = _call(graph, move.target, made, *move.args[1:], **move.kwargs)
        quantize.replace_all_uses_with(made)
        # torch marks attention as random, so dead code elimination would keep it: erase it here
        for node in (quantize, *self.moves, self.core):
            graph.erase_node(node)


def _call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A node with its value's shape."""
    node = graph.call_function(target, args, kwargs)
    given = fx.node.map_arg((args, kwargs), _value)
    node.meta["val"] = target(*given[0], **given[1])
    return node


def _site(quantize: Node) -> _Site | None:
    """The attention that a quantize node rounds to all of its integers."""
    if not _is(quantize, _QUANTIZE) or tuple(quantize.args[3:]) != (0, 255, torch.uint8):
        return None
    moves: list[Node] = []
    node = quantize.args[0]
    while _only(node) and node.target in _MOVES:
        moves.append(node)
        node = node.args[0]
    if not _only(node):
        return None
    found = None
    if node.target is _ATEN.scaled_dot_product_attention.default:
        found = _whole(node)
    elif node.target is _ATEN.matmul.default:
        found = _apart(node)
    if found is None or not _fits(found):
        return None
    return replace(found, moves=moves)


def _whole(node: Node) -> _Site | None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if any(given.get(name) for name in ("dropout_p", "is_causal", "enable_gqa")):
        return None
    q, k, v, mask = (given.get(name) for name in names[:4])
    if not all(isinstance(n, fx.Node) and _value(n).dim() == 4 for n in (q, k, v)):
        return None
    added: tuple[Any, ...] = ()
    if mask is not None:
        shape = added_shape(_value(mask), _value(node).dim(), _scores_shape(q, k))
        if shape is None:
            return None
        added = ((mask, shape),)
    scale = given.get("scale") or 1.0 / math.sqrt(_value(q).shape[-1])
    return _Site(q, k, v, False, _Scores(node, float(scale), added=added), node)


def _scores_shape(q: Node, k: Node) -> tuple[Any, ...]:
    return (*_value(q).shape[:3], _value(k).shape[2])


def _apart(node: Node) -> _Site | None:
    weights, v = node.args
    reshaped = False
    while _only(weights) and weights.target in _RESHAPES:
        weights, reshaped = weights.args[0], True
    if not _only(weights) or weights.target is not _ATEN.softmax.int or reshaped:
        return None
    value = _value(weights)
    if weights.args[1] not in (-1, value.dim() - 1) or not isinstance(v, fx.Node):
        return None
    rank = _value(v).dim()
    if rank not in (3, 4) or value.dim() != rank:
        return None
    shape = tuple(value.shape) if rank == 4 else (value.shape[0], 1, *value.shape[1:])
    scores = _scores(weights.args[0], shape)
    if scores is None or _value(scores.product).dim() != rank:
        return None
    q, k = scores.product.args
    scale, q = _scaled(q)
    return _Site(q, k, v, True, replace(scores, scale=scores.scale * scale), node)


def _scores(node: Any, shape: tuple[Any, ...]) -> _Scores | None:
    """What is between a softmax over scores of this shape and their product."""
    scale = 1.0
    rounding: tuple[float, int] = (0.0, 0)
    added: list[tuple[Node, tuple[int, ...]]] = []
    while _only(node) and node.target is not _ATEN.matmul.default:
        if node.target is _ATEN.add.Tensor and not node.kwargs:
            if scale != 1.0 or rounding[0] or len(added) == MOST_ADDED:
                return None
            sides = [side for side in node.args if isinstance(side, fx.Node)]
            inner = [side for side in sides if _leads_to_product(side)]
            if len(sides) != 2 or len(inner) != 1:
                return None
            other = sides[1] if inner[0] is sides[0] else sides[0]
            fitted = added_shape(_value(other), _value(node).dim(), shape)
            if fitted is None or _value(inner[0]).shape != _value(node).shape:
                return None
            added.append((other, fitted))
            node = inner[0]
        elif node.target in _RESHAPES and _keeps_heads(node, shape):
            node = node.args[0]
        elif _is(node, _DEQUANTIZE) and _is(node.args[0], _QUANTIZE) and _only(node.args[0]):
            inside = node.args[0]
            if scale != 1.0 or rounding[0] or node.args[1:] != inside.args[1:]:
                return None
            if tuple(inside.args[3:]) != (0, 255, torch.uint8):
                return None
            rounding, node = (inside.args[1], inside.args[2]), inside.args[0]
        else:
            factor, source = _scaled(node)
            if source is node:
                return None
            if rounding[0]:
                return None
            scale, node = scale * factor, source
    if not _only(node):
        return None
    return _Scores(node, scale, rounding, tuple(added))


def _leads_to_product(node: fx.Node, additions: int = MOST_ADDED) -> bool:
    """Whether only what ``_scores`` follows lies between a node and a product, so many additions at most."""
    while _only(node):
        if node.target is _ATEN.matmul.default:
            return True
        if node.target is _ATEN.add.Tensor:
            sides = [side for side in node.args if isinstance(side, fx.Node)]
            return additions > 0 and any(_leads_to_product(n, additions - 1) for n in sides)
        scaled = _scaled(node)[1]
        known = node.target in _RESHAPES or _is(node, _DEQUANTIZE) or _is(node, _QUANTIZE)
        if scaled is node and not known:
            return False
        node = scaled if scaled is not node else node.args[0]
    return False


def _scaled(node: fx.Node) -> tuple[float, Any]:
    """The number that a node multiplies by, and what it multiplies; 1 and the node, if it does not."""
    if _only(node) and node.target in (_ATEN.mul.Tensor, _ATEN.div.Tensor):
        source, factor = node.args
        if isinstance(source, fx.Node) and isinstance(factor, (int, float)) and factor:
            return (factor if node.target is _ATEN.mul.Tensor else 1.0 / factor), source
    return 1.0, node


def _keeps_heads(node: Node, shape: tuple[Any, ...]) -> bool:
    """Whether a reshape leaves heads, queries and keys alone, on both of its sides."""
    return all(tuple(_value(n).shape[-3:]) == shape[-3:] for n in (node, node.args[0]))


def _fits(site: _Site) -> bool:
    """Whether the kernel takes these tensors."""
    q, k, v = (_value(node) for node in (site.q, site.k, site.v))
    if any(not isinstance(x, torch.Tensor) or x.dtype != torch.float32 for x in (q, k, v)):
        return False
    if len({x.dim() for x in (q, k, v)}) != 1:
        return False
    k = k.transpose(-1, -2) if site.transposed else k
    known = all(isinstance(size, int) for x in (q, k, v) for size in x.shape[1:])
    lead = q.shape[:-2]
    same = lead == k.shape[:-2] == v.shape[:-2] and q.shape[-1] == k.shape[-1]
    if not (known and same and k.shape[-2] == v.shape[-2] and 0 < k.shape[-2] <= MOST_KEYS):
        return False
    batch = lead[0] if q.dim() == 4 else q.shape[0]
    return all(shape[0] == 1 or _divides(shape[0], batch) for _, shape in site.scores.added)


def _divides(part: int, batch: Any) -> bool:
    return isinstance(batch, int) and batch % part == 0
