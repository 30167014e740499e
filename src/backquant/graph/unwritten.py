"""Memory that nobody has written (``torch.empty``), as zeros.

Whoever reads it before it is written may get anything. Files of models admit no such operator, exporters have
none, and two calls that should be equal are not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from backquant.graph.rewrite import GraphRewriter

_ZEROS: dict[Any, Any] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    "new_empty": "new_zeros",
}
#: The same by the names of aten overloads, as in exported graphs.
_OVERLOADS = {
    "aten.empty.memory_format": "zeros",
    "aten.empty_like.default": "zeros_like",
    "aten.new_empty.default": "new_zeros",
}


def zeros_for_unwritten(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """A new tensor without values as zeros, under the same name.

    >>> module = fx.symbolic_trace(lambda x: torch.empty_like(x))
    >>> GraphRewriter(module).apply(zeros_for_unwritten), module(torch.ones(2))
    (1, tensor([0., 0.]))
    """
    name = _OVERLOADS.get(str(node.target))
    zeros = _ZEROS.get(node.target) if name is None else getattr(torch.ops.aten, name).default
    if zeros is None or node.op not in ("call_function", "call_method"):
        return None
    kwargs = dict(node.kwargs)
    if "zeros_like" not in str(zeros):
        kwargs.pop("memory_format", None)
    return write.retarget(node, zeros, *node.args, **kwargs)
