"""The last step of a lowering: what is left of quantize and dequantize nodes.

1. A quantize node on a dequantize node with the same qparams disappears (the round trip is exact).
2. With other qparams the two become one ``requantize`` kernel.
3. The others become the fast boundary kernels.
4. Dequantize nodes that nothing reads are erased, and what only they read: constants, and the nodes of
   dynamic quantization.
5. Where a custom module takes quantized tensors, it gets the integers as one, and they are taken out of the
   one that it gives.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from backquant.dtypes import plain_dtype
from backquant.lower.dynamic import is_dynamic_boundary
from backquant.lower.kernels.boundary import (
    dequantize,
    integers_of,
    quantize,
    quantized_tensor,
    requantize,
)
from backquant.lower.qdq import (
    integer_source,
    is_dequantize,
    is_quantize,
    is_weight_dequantize,
    qparams_of,
)

__all__ = ["fold_boundaries", "is_boundary"]

_KERNELS = (quantize, dequantize, requantize, quantized_tensor, integers_of)


def is_boundary(node: Any) -> bool:
    """Whether ``node`` crosses between float and integers, in the QDQ dialect or lowered."""
    if is_quantize(node) or is_dequantize(node):
        return True
    return isinstance(node, Node) and node.op == "call_function" and node.target in _KERNELS


def fold_boundaries(graph: Graph) -> None:
    """Apply the rules above to ``graph``."""
    for node in list(graph.nodes):
        if is_quantize(node) and is_dequantize(node.args[0]):
            _join(graph, node)
        elif node.target is torch.quantize_per_tensor and is_dequantize(node.args[0]):
            _pass_integers(node)
        elif is_quantize(node) and node.args[0].target == "dequantize":
            node.target, node.args = integers_of, (node.args[0].args[0], *node.args[1:])
    _erase_unread(graph)
    for node in graph.nodes:
        if is_quantize(node):
            node.target = quantize
        elif is_dequantize(node):
            node.target = dequantize


def _join(graph: Graph, node: Node) -> None:
    """Rules 1 and 2."""
    before = node.args[0]
    assert isinstance(before, Node)
    source, old, new = integer_source(before), qparams_of(before), qparams_of(node)
    if old == new:
        node.replace_all_uses_with(source)
    else:
        with graph.inserting_before(node):
            args = (source, old.scale, old.zero_point, *new.literals)
            joined = graph.create_node("call_function", requantize, args, {}, node.name)
        node.replace_all_uses_with(joined)
    graph.erase_node(node)


def _pass_integers(node: Node) -> None:
    """Rule 5, before a custom module."""
    before, scale, zero_point, dtype = node.args
    assert isinstance(before, Node) and isinstance(dtype, torch.dtype)
    own = qparams_of(before)
    if (own.scale, own.zero_point, own.dtype) == (scale, zero_point, plain_dtype(dtype)):
        node.target, node.args = quantized_tensor, (integer_source(before), scale, zero_point)


def _erase_unread(graph: Graph) -> None:
    for node in reversed(list(graph.nodes)):
        constant = node.op == "get_attr" or is_dequantize(node) or is_weight_dequantize(node)
        constant = constant or node.target == "dequantize"
        if not node.users and (constant or is_dynamic_boundary(node)):
            graph.erase_node(node)
