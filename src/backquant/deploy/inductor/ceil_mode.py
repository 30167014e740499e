"""Max pooling in ceil mode, which Inductor's integer max pooling reads as floor mode.

Its pattern (torch 2.13, ``_register_quantization_maxpool2d``) takes the argument ``ceil_mode`` for the
``offset_dtype`` of another form, and drops it: results are a row and a column short. So the pooling reads
the dequantized value through a clamp that changes no value. The pattern does not contain it, and the
code that is generated instead is right.
"""

from __future__ import annotations

from torch import fx

from backquant.deploy.edits import AtenCalls
from backquant.deploy.program import Program
from backquant.lower.qdq import is_dequantize
from backquant.operators import overload

_CEIL_MODE = 5  # its position in the schema


def keep_ceil_mode(program: Program) -> None:
    """Put such a bound, in ``program`` itself, between a dequantize node and each pooling in ceil mode.

    >>> import torch
    >>> from backquant.deploy.program import export_program
    >>> from backquant.graph.decomposed import register_quantized_decomposed
    >>> register_quantized_decomposed()
    >>> def pooled(q):
    ...     x = torch.ops.quantized_decomposed.dequantize_per_tensor(q, 0.1, 0, 0, 255, torch.uint8)
    ...     return torch.max_pool2d(x, 3, 2, ceil_mode=True)
    >>> integers = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    >>> made = export_program(fx.symbolic_trace(pooled), (integers,), {}, None)
    >>> keep_ceil_mode(made)
    >>> [node.name for node in made.exported.graph.nodes]
    ['q', 'dequantize_per_tensor', 'clamp_min_default', 'max_pool2d', 'output']
    """
    graph = program.exported.graph
    for node in graph.find_nodes(op="call_function", target=overload("max_pool2d")):
        value = node.args[0]
        if not (_in_ceil_mode(node) and isinstance(value, fx.Node) and is_dequantize(value)):
            continue
        _, scale, zero_point, low, _, _ = value.args
        least = (low - zero_point - 1) * scale  # type: ignore[operator]
        node.replace_input_with(value, AtenCalls(node).clamp_min(value, least))
    program.exported.graph_module.recompile()


def _in_ceil_mode(node: fx.Node) -> bool:
    return len(node.args) > _CEIL_MODE and bool(node.args[_CEIL_MODE])
