"""Attention as the operators that it stands for, where a mapping asks for its products.

``F.scaled_dot_product_attention`` is one operator, and no kernel on integers computes it. A target whose
``QDQRules.attention`` is ``"products"`` has integer matrix products: there it becomes ``matmul``, ``mul``,
``softmax`` and ``matmul``, each with its own entry.

Source: PyTorch documentation, ``torch.nn.functional.scaled_dot_product_attention`` (its equivalent in
Python).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from backquant.backend_config import BackendConfig
from backquant.graph import Captured, Scope
from backquant.match.qconfig_reader import QConfigReader
from backquant.match.rules import RuleTable
from backquant.operators import find, moves_values
from backquant.qconfig import QConfigMapping

_ARGUMENTS = (
    *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
)


def decompose_attention(
    captured: Captured, backend: BackendConfig, mapping: QConfigMapping
) -> None:
    """Write the attention of ``captured`` apart, in place, where ``mapping`` asks for integer products.

    It does where the mapping has a QConfig for ``torch.matmul`` at that place. ``None`` for
    ``F.scaled_dot_product_attention`` itself leaves it whole, and so do dropout, shared heads, and masks
    that may be added (masks of bools are recognised by the node that makes them, or as constants).

    >>> from backquant.backend_config import QDQRules
    >>> from backquant.graph import capture
    >>> from backquant.qconfig import get_default_qconfig
    >>> class Attention(torch.nn.Module):
    ...     def forward(self, q, k, v):
    ...         return F.scaled_dot_product_attention(q, k, v)
    >>> captured = capture(Attention())
    >>> mapping = QConfigMapping().set_global(get_default_qconfig("x86"))
    >>> decompose_attention(captured, BackendConfig("b").set_qdq(QDQRules(attention="products")), mapping)
    >>> [node.name for node in captured.module.graph.nodes if node.op != "placeholder"]
    ['transpose', 'matmul', 'size', 'pow_1', 'mul', 'softmax', 'matmul_1', 'output']
    """
    if backend.qdq is None or backend.qdq.attention == "whole":
        return
    table, reader, changed = RuleTable(mapping), QConfigReader(), False
    for node in list(captured.module.graph.nodes):
        if node.op != "call_function" or not _is_attention(node.target):
            continue
        scope = captured.scopes.get(node.name, Scope("", None))
        given = dict(zip(_ARGUMENTS, node.args, strict=False)) | node.kwargs
        if _is_plain(given) and _is_requested(table, reader, scope):
            _decompose(captured, node, given)
            changed = True
    if changed:
        captured.module.recompile()


def _is_attention(target: Any) -> bool:
    known = find(target)
    return known is not None and known.name == "scaled_dot_product_attention"


def _is_plain(given: dict[str, Any]) -> bool:
    mask = given.get("attn_mask")
    return not (given.get("dropout_p") or given.get("enable_gqa")) and (
        mask is None or _is_bool(mask)
    )


def _is_requested(table: RuleTable, reader: QConfigReader, scope: Scope) -> bool:
    whole = table.by_type(F.scaled_dot_product_attention)
    if whole is not None and whole.qconfig is None:
        return False
    hit = table.by_name(scope.path)
    if hit is None and scope.module_type is not None:
        hit = table.by_type(scope.module_type)
    hit = hit or table.by_type(torch.matmul) or table.fallback
    request = reader.activation(hit.qconfig, str(hit.rule))
    return request is not None and not request.is_dynamic and not request.dtype.is_floating_point


def _decompose(captured: Captured, node: fx.Node, given: dict[str, Any]) -> None:
    """Scores are scaled, not queries: products read what linear layers give."""
    graph, query, key = captured.module.graph, given["query"], given["key"]
    made: list[fx.Node] = []

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        kind = graph.call_method if isinstance(target, str) else graph.call_function
        made.append(kind(target, args, kwargs))
        return made[-1]

    with graph.inserting_before(node):
        scores = call(torch.matmul, query, call("transpose", key, -2, -1))
        scale = given.get("scale")
        if scale is None:
            scale = call(operator.pow, call("size", query, -1), -0.5)
        scores = call(torch.mul, scores, scale)
        mask = given.get("attn_mask")
        if given.get("is_causal"):
            ones = call("new_ones", query, (call("size", query, -2), call("size", key, -2)))
            mask = call("bool", call("tril", ones))
        if mask is not None:
            hidden = call("logical_not", mask)
            scores = call("masked_fill", scores, hidden, torch.finfo(torch.float32).min)
        weights = call(F.softmax, scores, dim=-1)
        result = call(torch.matmul, weights, given["value"])
    node.replace_all_uses_with(result)
    _reshape_views(result)
    scope = captured.scopes.pop(node.name, None)
    graph.erase_node(node)
    if scope is not None:
        captured.scopes.update((one.name, scope) for one in made)


def _reshape_views(result: fx.Node) -> None:
    """Let what views ``result`` turned around reshape it: the operator lays heads inside of positions, a
    product does not.
    """
    reached = [result]
    while reached:
        for user in reached.pop().users:
            known = find(user.target)
            if known is not None and known.name in ("transpose", "permute", "view", "reshape"):
                reached.append(user)
                user.target = "reshape" if user.target == "view" else user.target


# -- masks of bools, told by what makes them ------------------------------------------------------------

_COMPARISONS = frozenset(
    {
        *("lt", "le", "gt", "ge", "eq", "ne", "isfinite", "isnan", "bool"),
        *("logical_and", "logical_or", "logical_not", "logical_xor"),
    }
)
_BITWISE = frozenset(
    {
        *("and_", "or_", "invert", "__and__", "__or__", "bitwise_and", "bitwise_or", "bitwise_not"),
    }
)
_TYPED = frozenset({"to", "_to_copy", "ones", "new_ones", "full", "new_full"})
# also where a mask is taken apart: these add False
_TRIANGLES = frozenset({"tril", "triu", "index", "getitem"})


def _is_bool(node: Any) -> bool:
    """Whether a value holds bools for certain; additive masks and inputs of the model do not."""
    if isinstance(node, fx.Node) and node.op == "get_attr":
        constant = operator.attrgetter(str(node.target))(node.graph.owning_module)
        return getattr(constant, "dtype", None) is torch.bool
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else node.target.__name__
    name = name.partition(".")[0]
    if name in _TYPED:
        return torch.bool in (*node.args, *node.kwargs.values())
    if moves_values(node.target) or name in _TRIANGLES:
        return _is_bool(node.args[0])
    return name in _COMPARISONS or (name in _BITWISE and all(map(_is_bool, node.all_input_nodes)))
