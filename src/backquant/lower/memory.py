"""Which values a kernel may overwrite: those that nothing reads afterwards."""

from __future__ import annotations

from torch.fx import GraphModule, Node

from backquant.graph import get_module
from backquant.lower.kernels.configured import KernelModule
from backquant.lower.qdq import is_dequantize, is_quantize


def may_overwrite(
    graph_module: GraphModule, value: Node, reading: Node, replaced: Node | None = None
) -> bool:
    """Whether nothing reads the memory of the integers ``value`` after the node ``reading``, but for
    ``replaced``, which ``reading`` takes the place of.

    ``value`` must be made by a kernel, in memory of its own, and so must be what its other readers
    make. Readers may stand behind dequantize nodes.

    >>> import torch
    >>> traced = torch.fx.symbolic_trace(torch.nn.Identity())
    >>> x, out = traced.graph.nodes
    >>> may_overwrite(traced, x, out)  # it is the caller's own tensor
    False
    """
    if not makes_memory(graph_module, value):
        return False
    for user in value.users:
        if user is reading or user is replaced:
            continue
        if is_dequantize(user):
            if any(reader is not reading for reader in user.users):
                return False
        elif not (user < reading and makes_memory(graph_module, user)):
            return False
    return True


def makes_memory(graph_module: GraphModule, node: Node) -> bool:
    """Whether ``node`` returns integers in newly allocated memory."""
    if is_quantize(node):
        return True
    if node.op == "call_module":
        return isinstance(get_module(graph_module, str(node.target)), KernelModule)
    home = getattr(node.target, "__module__", "") or ""
    return node.op == "call_function" and home.startswith("backquant.lower.kernels.")
