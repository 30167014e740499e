"""Which calls of ``F.scaled_dot_product_attention`` can be written as two products and a softmax."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from backquant.operators import find, moves_values

_ARGUMENTS = (
    *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
)


def as_products(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of attention that has a form with products, by name; ``None`` for any other node.

    Dropout, shared heads, and masks that may be added have none; masks of bools are recognised by the node
    that makes them, or as constants.

    >>> graph = fx.Graph()
    >>> q = graph.placeholder("q")
    >>> attention = torch.nn.functional.scaled_dot_product_attention
    >>> list(as_products(graph.call_function(attention, (q, q, q))))
    ['query', 'key', 'value']
    >>> as_products(graph.call_function(attention, (q, q, q, graph.placeholder("mask")))) is None
    True
    """
    known = find(node.target) if node.op == "call_function" else None
    if known is None or known.name != "scaled_dot_product_attention":
        return None
    given = dict(zip(_ARGUMENTS, node.args, strict=False)) | node.kwargs
    mask = given.get("attn_mask")
    if given.get("dropout_p") or given.get("enable_gqa"):
        return None
    return given if mask is None or _is_bool(mask) else None


# -- boolean masks, recognized by the operators that make them -------------------------------------------

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
# They may set entries of a mask to False, or select some: a mask stays a mask.
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
