"""Values of an exported graph that depend on no input, computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

_LARGE = 1 << 22  # elements


class Constants:
    """The values of nodes that depend on no input; none that is random, or large and made of little.

    >>> graph = fx.Graph()
    >>> w = graph.placeholder("w")
    >>> known = Constants({w: torch.ones(2)})
    >>> twice = graph.call_function(torch.ops.aten.mul.Tensor, (w, 2))
    >>> known.compute(twice)
    tensor([2., 2.])
    """

    def __init__(self, tensors: dict[fx.Node, torch.Tensor]) -> None:
        self._values: dict[fx.Node, Any] = dict(tensors)

    def __contains__(self, node: object) -> bool:
        return node in self._values

    def __getitem__(self, node: fx.Node) -> Any:
        return self._values[node]

    def compute(self, node: fx.Node) -> Any:
        """The value of ``node`` (noted for those who read it), or ``None`` if it is no constant."""
        if not self._may(node):
            return None
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)
        with torch.no_grad():
            value = node.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(value, torch.Tensor) and value.numel() > _LARGE:
            read = sum(self._size(source) for source in node.all_input_nodes)
            if value.numel() > 2 * read:
                return None
        self._values[node] = value
        return value

    def _may(self, node: fx.Node) -> bool:
        if not isinstance(node.target, OpOverload) and node.op != "call_function":
            return False
        if isinstance(node.target, OpOverload) and _is_random(node.target):
            return False
        return all(source in self._values for source in node.all_input_nodes)

    def _size(self, node: fx.Node) -> int:
        value = self._values[node]
        return value.numel() if isinstance(value, torch.Tensor) else 0


def _is_random(overload: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in overload.tags or overload.namespace != "aten"
