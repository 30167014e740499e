"""Signed activations on engines whose kernels take unsigned ones: integers and zero points plus 128.

``(integer - zero_point) * scale`` is the same number when both integer and zero point are larger by 128. So
what is int8 between a quantize node and its dequantize nodes is uint8 there instead: equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import fx

from backquant.dtypes import QParams
from backquant.lower.engine import EngineInfo
from backquant.lower.qdq import is_dequantize, is_quantize, qparams_of

_SHIFT = 128


def as_unsigned(graph: fx.Graph, engine: EngineInfo, separate: Collection[str]) -> None:
    """Rewrite ``graph`` where it stands. What ``separate`` names, and what else reads integers, keep int8.

    >>> from backquant.graph import register_quantized_decomposed
    >>> from backquant.lower.engine import engine_info
    >>> register_quantized_decomposed()
    >>> ops = torch.ops.quantized_decomposed
    >>> def f(x):
    ...     q = ops.quantize_per_tensor.default(x, 0.5, -3, -128, 127, torch.int8)
    ...     return ops.dequantize_per_tensor.default(q, 0.5, -3, -128, 127, torch.int8)
    >>> traced = fx.symbolic_trace(f)
    >>> as_unsigned(traced.graph, engine_info("x86"), ())
    >>> [node.args[1:] for node in traced.graph.nodes if node.op == "call_function"]
    [(0.5, 125, 0, 255, torch.uint8), (0.5, 125, 0, 255, torch.uint8)]
    """
    if torch.int8 in engine.activation_dtypes or torch.uint8 not in engine.activation_dtypes:
        return
    for node in graph.nodes:
        if not is_quantize(node) or qparams_of(node).dtype != torch.int8:
            continue
        both = (node, *node.users)
        if not any(one.name in separate for one in both) and all(map(is_dequantize, node.users)):
            for one in both:
                one.args = (one.args[0], *_shifted(qparams_of(one)).literals)


def _shifted(signed: QParams) -> QParams:
    return replace(
        signed,
        zero_point=signed.zero_point + _SHIFT,
        quant_min=signed.quant_min + _SHIFT,
        quant_max=signed.quant_max + _SHIFT,
        dtype=torch.uint8,
    )
