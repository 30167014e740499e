"""Attention as the operators that it stands for, where a mapping asks for its products.

``F.scaled_dot_product_attention`` is one operator, and no kernel on integers computes it. A target whose
``QDQRules.attention`` is ``"products"`` has integer matrix products: there it becomes ``matmul``, ``mul``,
``softmax`` and ``matmul``, each with its own entry.

Source: PyTorch documentation, ``torch.nn.functional.scaled_dot_product_attention`` (its equivalent in
Python).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from backquant.backend_config import BackendConfig
from backquant.graph import Captured, GraphRewriter, Scope, reshape_views
from backquant.graph.computed_once import computed_once
from backquant.match.attention import as_products
from backquant.match.qconfig_reader import QConfigReader
from backquant.match.rules import RuleTable
from backquant.qconfig import QConfigMapping


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
    table, reader = RuleTable(mapping), QConfigReader()

    def products(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
        given, scope = as_products(node), write.scopes.get(node.name, Scope("", None))
        is_meant = given is not None and _is_requested(table, reader, scope)
        return _products(partial(write.call, node), **given) if given and is_meant else None

    if GraphRewriter(captured.module, captured.scopes).apply(products):
        # the operator lays heads inside of positions, a product does not
        reshape_views(captured.module.graph)
        computed_once(captured.module, captured.scopes)  # scores that two attentions share
        captured.module.recompile()


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


def _products(
    call: Callable[..., fx.Node],
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    attn_mask: Any = None,
    is_causal: bool = False,
    scale: Any = None,
    **_: Any,
) -> fx.Node:
    """Scores are scaled, not queries: products read what linear layers give."""
    scores = call(torch.matmul, query, call("transpose", key, -2, -1))
    if scale is None:
        scale = call(operator.pow, call("size", query, -1), -0.5)
    scores = call(torch.mul, scores, scale)
    if is_causal:
        ones = call("new_ones", query, (call("size", query, -2), call("size", key, -2)))
        attn_mask = call("bool", call("tril", ones))
    if attn_mask is not None:
        hidden = call("logical_not", attn_mask)
        scores = call("masked_fill", scores, hidden, torch.finfo(torch.float32).min)
    return call(torch.matmul, call(F.softmax, scores, dim=-1), value)
