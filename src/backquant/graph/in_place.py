"""Calls in place in a symbolic trace: what reads the changed value later reads the call's result.

A trace records ``F.relu(x, inplace=True)`` as a call like any other, and readers of ``x`` behind it read
``x``: in the model the changed one. Once quantize nodes stand between the two they are two tensors, and the
change would be lost.

1. Later readers of the changed value read the result instead; the call itself stays as it was written.
2. A change of a view (``x[:, :4].mul_(2)``) has no result that stands for the whole tensor:
   ``changed_view`` names it where the tensor is read later.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import fx, nn

__all__ = ["changed_view", "read_changed_values"]

_VIEWS = frozenset(
    {
        *(
            "view",
            "view_as",
            "reshape",
            "flatten",
            "unflatten",
            "transpose",
            "permute",
            "t",
            "select",
        ),
        *(
            "narrow",
            "chunk",
            "split",
            "unbind",
            "squeeze",
            "unsqueeze",
            "expand",
            "movedim",
            "swapaxes",
        ),
        *("getitem", "diagonal", "unfold", "detach", "real", "imag", "tensor_split"),
    }
)
_OPERATORS = frozenset(
    {
        operator.iadd,
        operator.isub,
        operator.imul,
        operator.itruediv,
        operator.ifloordiv,
        operator.imod,
        operator.ipow,
        operator.iand,
        operator.ior,
        operator.ixor,
    }
)


def read_changed_values(graph: fx.Graph, root: nn.Module) -> None:
    """Rule 1, in place.

    >>> def twice(x):
    ...     torch.relu_(x)
    ...     return x + 1
    >>> graph = fx.symbolic_trace(twice).graph
    >>> read_changed_values(graph, nn.Module())
    >>> [str(arg) for node in graph.nodes if node.name == "add" for arg in node.args]
    ['relu_', '1']
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node, value in _changes(graph, root):
        for user in list(value.users):
            if position[user] > position[node]:
                user.replace_input_with(value, node)


def changed_view(graph: fx.Graph, root: nn.Module) -> str:
    """The name of a call that changes a view of a tensor which is read later; ``""`` where none does.

    >>> def first(x):
    ...     y = x + 1
    ...     y[0].mul_(2)
    ...     return y
    >>> changed_view(fx.symbolic_trace(first).graph, nn.Module())
    'mul_'
    """
    position = {node: index for index, node in enumerate(graph.nodes)}
    for node, value in _changes(graph, root):
        base = _viewed(value)
        while base is not None:
            if any(position[user] > position[node] for user in base.users):
                return node.name
            base = _viewed(base)
    return ""


def _changes(graph: fx.Graph, root: nn.Module) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each call in place with the value that it changes, in graph order."""
    for node in graph.nodes:
        value = node.args[0] if node.args else node.kwargs.get("input")
        if isinstance(value, fx.Node) and _is_in_place(node, root):
            yield node, value


def _is_in_place(node: fx.Node, root: nn.Module) -> bool:
    if node.op == "call_module":
        return getattr(root.get_submodule(str(node.target)), "inplace", False) is True
    if node.op == "call_method":
        return _ends_in_place(str(node.target))
    if node.op != "call_function":
        return False
    if node.target in _OPERATORS or _ends_in_place(getattr(node.target, "__name__", "")):
        return True
    place = _inplace_position(node.target)
    given = node.args[place] if place is not None and place < len(node.args) else None
    return given is True or node.kwargs.get("inplace") is True


def _ends_in_place(name: str) -> bool:
    """``relu_``, and not ``__iadd__``: torch's name for changing the first argument."""
    return name.endswith("_") and not name.endswith("__") and hasattr(torch.Tensor, name)


@cache
def _inplace_position(function: Callable[..., Any]) -> int | None:
    """Where a function takes ``inplace``, if it does."""
    if not str(getattr(function, "__module__", "")).startswith("torch.nn.functional"):
        return None
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index("inplace") if "inplace" in names else None


def _viewed(node: fx.Node) -> fx.Node | None:
    """What ``node`` may be a view of."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    source = node.args[0] if node.args else None
    is_view = node.op in ("call_method", "call_function") and name in _VIEWS
    return source if is_view and isinstance(source, fx.Node) else None
