"""Readers of a dequantized value that an in-place operator changed read that operator's result.

An in-place operator gives the tensor that it changed, so a later reader of the one reads the other.
Kernels change nothing in place: only the second form stays right when the operator becomes a kernel.
"""

from __future__ import annotations

from torch import fx, nn

from backquant.graph.mutation import changes_argument
from backquant.lower.qdq import is_dequantize


def read_results(graph: fx.Graph, modules: nn.Module) -> None:
    """Rewrite ``graph`` where it stands; costs the uses of the values that are changed in place.

    Args:
        graph: whose calls are written in an order in which they can run.
        modules: the root that its ``call_module`` nodes name.

    >>> import torch
    >>> from backquant.graph import register_quantized_decomposed
    >>> register_quantized_decomposed()
    >>> def f(x):
    ...     y = torch.ops.quantized_decomposed.dequantize_per_tensor.default(x, 0.1, 0, 0, 9, torch.uint8)
    ...     z = y.relu_()
    ...     return y * z
    >>> traced = fx.symbolic_trace(f)
    >>> read_results(traced.graph, traced)
    >>> [node.args for node in traced.graph.nodes if node.name == "mul"]
    [(relu_, relu_)]
    """
    position = {node: place for place, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        changed = _changed(node, modules)
        if changed is None:
            continue
        for user in list(changed.users):
            if position[user] > position[node]:
                user.replace_input_with(changed, node)


def _changed(node: fx.Node, modules: nn.Module) -> fx.Node | None:
    """The dequantized value that a call changes in place and returns."""
    first = node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(first, fx.Node) or not is_dequantize(first):
        return None
    called = modules.get_submodule(str(node.target)) if node.op == "call_module" else None
    return first if changes_argument(node, called) else None
