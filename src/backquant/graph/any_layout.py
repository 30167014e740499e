"""Views that hold for any memory layout.

The integer kernels of convolutions give channels-last tensors where the float model's were contiguous, and
attention and equations written as products give other strides than these operators: ``view`` may find
strides that it cannot keep. ``reshape`` gives the same values, and the same view wherever there is one.
"""

from __future__ import annotations

import torch
from torch import fx, nn
from torch.fx import Graph

_RESHAPES = {"view": "reshape", "view_as": "reshape_as"}


def reshape_views(graph: Graph) -> None:
    """Turn ``view`` into ``reshape``, except where it reads the bits as another dtype.

    >>> from torch.fx import symbolic_trace
    >>> graph = symbolic_trace(lambda x: x.view(2, -1).view(torch.int32)).graph
    >>> reshape_views(graph)
    >>> [node.target for node in graph.nodes if node.op == "call_method"]
    ['reshape', 'view']
    """
    for node in graph.nodes:
        if node.op == "call_method" and node.target in _RESHAPES:
            values = (*node.args[1:], *node.kwargs.values())
            if not any(isinstance(value, torch.dtype) for value in values):
                node.target = _RESHAPES[str(node.target)]


# Reads of ranks (``x.ndim``, ``x.dim()``), as modules have in assertions, moved before what keeps them.
#
# A read of a convolution's result would keep the batch norm behind it from being fused; its input has the
# same rank.

_KEEP_RANK = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
)


def move_rank_reads(module: fx.GraphModule) -> int:
    """Let reads of ranks read the input of convolutions, linear layers and batch norms, in place; how many.

    >>> graph = fx.Graph()
    >>> made = graph.call_module("conv", (graph.placeholder("x"),))
    >>> _ = graph.output((made, graph.call_method("dim", (made,))))
    >>> module = fx.GraphModule({"conv": nn.Conv1d(1, 1, 1)}, graph)
    >>> move_rank_reads(module), [str(node.args) for node in graph.nodes if node.op == "call_method"]
    (1, ['(x,)'])
    """
    count = 0
    for node in module.graph.nodes:
        if _reads_rank(node):
            source = _source(module, node.args[0])
            count += source is not node.args[0]
            node.args = (source, *node.args[1:])
    return count


def _reads_rank(node: fx.Node) -> bool:
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.op == "call_function" and node.target is getattr:
        return node.args[1:] == ("ndim",)
    return node.op == "call_method" and node.target in ("dim", "ndimension")


def _source(module: fx.GraphModule, node: fx.Node) -> fx.Node:
    """The first value with the rank of ``node``, up a chain of modules that keep it."""
    while node.op == "call_module" and len(node.args) == len(node.all_input_nodes) == 1:
        if type(module.get_submodule(str(node.target))) not in _KEEP_RANK:
            break
        node = node.all_input_nodes[0]
    return node
