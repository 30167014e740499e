"""Calls in place in a symbolic trace: what reads the changed value later reads the call's result.

A trace records ``F.relu(x, inplace=True)`` as a call like any other, and readers of ``x`` behind it read
``x``: in the model the changed one. Once quantize nodes stand between the two they are two tensors, and the
change would be lost.

1. Later readers of the changed value read the result instead; the call itself stays as it was written.
2. A change of a view (``x[:, :4].mul_(2)``) has no result that stands for the whole tensor:
   ``changed_view`` names it where the tensor is read later.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn

from backquant.graph.mutation import changes_argument, is_view


def read_changed_values(graph: fx.Graph, root: nn.Module) -> None:
    """Rule 1, in place.

    >>> import torch
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
        called = root.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(value, fx.Node) and changes_argument(node, called):
            yield node, value


def _viewed(node: fx.Node) -> fx.Node | None:
    """What ``node`` may be a view of."""
    source = node.args[0] if node.args else None
    called = node.op in ("call_method", "call_function") and is_view(node)
    return source if called and isinstance(source, fx.Node) else None
