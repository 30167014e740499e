"""Which values of a graph are observed elsewhere, or never: lists, constants, numbers."""

from __future__ import annotations

import operator

from torch import fx

from backquant.backend_config import BackendConfig
from backquant.graph.constants import input_independent

__all__ = ["constants_left_alone", "defaults_to_scalar", "items"]


def items(node: fx.Node) -> tuple[fx.Node, ...] | None:
    """What is read of the list of tensors that ``node`` gives, item by item; None if it is used whole.

    >>> import torch
    >>> graph = fx.Graph()
    >>> parts = graph.call_function(torch.chunk, (graph.placeholder("x"), 2))
    >>> first = graph.call_function(operator.getitem, (parts, 0))
    >>> items(parts)
    (getitem,)
    >>> joined = graph.call_function(torch.cat, (parts,))
    >>> items(parts) is None
    True
    """
    users = tuple(node.users)
    alone = all(
        user.target is operator.getitem and user.args[0] is node and isinstance(user.args[1], int)
        for user in users
    )
    return users if alone else None


def constants_left_alone(module: fx.GraphModule, backend_config: BackendConfig) -> set[str]:
    """Values without an input behind them, where the backend does not quantize constants."""
    rules = backend_config.qdq
    is_asked = rules is None or rules.quantize_constants
    return set() if is_asked else input_independent(module.graph)


def defaults_to_scalar(placeholder: fx.Node) -> bool:
    """An input such as ``scale: float = 2.0`` is a number."""
    return bool(placeholder.args) and isinstance(placeholder.args[0], (bool, int, float, str))
