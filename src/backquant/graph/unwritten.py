"""Memory that nobody has written (``torch.empty``), as zeros.

Whoever reads it before it is written may get anything. Files of models admit no such operator, exporters have
none, and two calls that should be equal are not.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import fx

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


def zeros_for_unwritten(module: fx.GraphModule, kept: Collection[Any] = ()) -> int:
    """Write new tensors without values as zeros, in place; how many. Operators in ``kept`` stay.

    >>> module = fx.symbolic_trace(lambda x: torch.empty_like(x))
    >>> zeros_for_unwritten(module), module(torch.ones(2))
    (1, tensor([0., 0.]))
    """
    count = 0
    for node in module.graph.nodes:
        zeros = _zeros(node) if node.target not in kept else None
        if zeros is None:
            continue
        node.target = zeros
        if "zeros_like" not in str(zeros):
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "memory_format"}
        count += 1
    if count:
        module.recompile()
    return count


def _zeros(node: fx.Node) -> Any:
    if node.op not in ("call_function", "call_method"):
        return None
    name = _OVERLOADS.get(str(node.target))
    return _ZEROS.get(node.target) if name is None else getattr(torch.ops.aten, name).default
