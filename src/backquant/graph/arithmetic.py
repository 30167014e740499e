"""What a call computes, whichever way it is spelled in a captured graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

__all__ = ["arithmetic_of", "plain_name"]

_ARITHMETIC: Mapping[Any, str] = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "div",
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    torch.add: "add",
    torch.sub: "sub",
    torch.mul: "mul",
    torch.div: "div",
}


def arithmetic_of(node: fx.Node) -> str | None:
    """``"add"``, ``"sub"``, ``"mul"`` or ``"div"`` of two values; ``None``: something else, or with options.

    >>> graph = fx.Graph()
    >>> arithmetic_of(graph.call_function(torch.ops.aten.div.Tensor, (1, 2)))
    'div'
    """
    if len(node.args) != 2 or node.kwargs:
        return None
    return _ARITHMETIC.get(plain_name(node.target))


def plain_name(target: Any) -> Any:
    """The name of an overload of ATen; other targets as they are.

    >>> plain_name(torch.ops.aten.relu6.default), plain_name("clamp")
    ('relu6', 'clamp')
    """
    is_aten = isinstance(target, OpOverload) and target.namespace == "aten"
    return target._opname if is_aten else target
