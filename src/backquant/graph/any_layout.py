"""Views that hold for any memory layout.

The integer kernels of convolutions give channels-last tensors where the float model's were contiguous, and
attention and equations written as products give other strides than these operators: ``view`` may find
strides that it cannot keep. ``reshape`` gives the same values, and the same view wherever there is one.
"""

from __future__ import annotations

import torch
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
