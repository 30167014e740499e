"""The last step of a lowering: what is left of quantize and dequantize nodes.

1. A quantize node on a dequantize node with the same qparams disappears (the round trip is exact).
2. With other qparams the two become one ``requantize`` kernel.
3. The others become the fast boundary kernels; of an engine that computes as described they stay, and rule 2
   is done on integers.
4. Dequantize nodes that nothing reads are erased, and what only they read: constants, and the nodes of
   dynamic quantization.
5. A product with constants that only a quantize node reads is made in place where a kernel made the float
   value for it alone: a new tensor of that size costs more than the product.
6. Where a custom module takes quantized tensors, it gets the integers as one, and they are taken out of the
   one that it gives.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from backquant.dtypes import plain_dtype
from backquant.graph import contract, get_module
from backquant.lower.chain import quantizes
from backquant.lower.contracts import boundaries_are_folded
from backquant.lower.dynamic import is_dynamic_boundary
from backquant.lower.engine_info import EngineInfo
from backquant.lower.kernels.boundary import (
    dequantize,
    integers_of,
    multiply,
    quantize,
    quantized_tensor,
    requantize,
)
from backquant.lower.kernels.integer.lookup_tables import rescale
from backquant.lower.kernels.packed import PackedKernel
from backquant.lower.qdq import (
    described_arithmetic,
    integer_source,
    is_dequantize,
    is_described_quantize,
    is_quantize,
    is_weight_dequantize,
    qparams_of,
)

_KERNELS = (quantize, dequantize, requantize, rescale, quantized_tensor, integers_of)


def is_boundary(node: Any) -> bool:
    """Whether ``node`` crosses between float and integers, in the QDQ dialect or lowered."""
    if is_quantize(node) or is_dequantize(node) or is_described_quantize(node):
        return True
    return isinstance(node, Node) and node.op == "call_function" and node.target in _KERNELS


@contract(ensures=[boundaries_are_folded])
def fold_boundaries(graph: Graph, engine: EngineInfo) -> None:
    """Apply the rules above to ``graph``."""
    for node in list(graph.nodes):
        if quantizes(node, engine) and is_dequantize(node.args[0]):
            _join(graph, node, engine)
        elif node.target is torch.quantize_per_tensor and is_dequantize(node.args[0]):
            _pass_integers(node)
        elif is_quantize(node) and node.args[0].target == "dequantize":
            node.target, node.args = integers_of, (node.args[0].args[0], *node.args[1:])
    _erase_unread(graph)
    if engine.as_described:
        return
    for node in graph.nodes:
        if is_quantize(node):
            _multiply_in_place(graph, node.args[0])
            node.target = quantize
        elif is_dequantize(node):
            node.target = dequantize


def _join(graph: Graph, node: Node, engine: EngineInfo) -> None:
    """Rules 1 and 2."""
    before = node.args[0]
    assert isinstance(before, Node)
    source, old, new = integer_source(before), qparams_of(before), qparams_of(node)
    if old == new:
        node.replace_all_uses_with(source)
    else:
        with graph.inserting_before(node):
            args: tuple[Any, ...] = (source, old.scale, old.zero_point, *new.literals)
            if engine.as_described:
                args = (*args, *described_arithmetic(node))
            kernel = rescale if engine.as_described else requantize
            joined = graph.create_node("call_function", kernel, args, {}, node.name)
        node.replace_all_uses_with(joined)
    graph.erase_node(node)


def _multiply_in_place(graph: Graph, product: Any) -> None:
    """Rule 5."""
    if not isinstance(product, Node) or product.target is not operator.mul or product.kwargs:
        return
    value, factors = product.args
    if not isinstance(value, Node) or value.op != "call_module" or len(value.users) > 1:
        return
    is_constant = isinstance(factors, Node) and factors.op == "get_attr"
    root = graph.owning_module
    if not is_constant or len(product.users) > 1 or root is None:
        return
    if isinstance(get_module(root, str(value.target)), PackedKernel):
        product.target = multiply


def _pass_integers(node: Node) -> None:
    """Rule 6, before a custom module."""
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
