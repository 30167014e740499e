"""Values of an exported graph that depend on no input, computed once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

_LARGE = 1 << 22  # elements
_aten = torch.ops.aten
#: Operators that read only dtype and device of their first argument.
_NEW = frozenset({_aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default})


class Constants:
    """The values of nodes that depend on no input; none that is random, or large and made of little.

    ``x.new_zeros(3, 4)`` depends on no value of ``x``: what is written into it (masks of windows) is known.

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
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._value)
        try:
            with torch.no_grad():
                value = node.target(*args, **kwargs)  # type: ignore[operator]
        except RuntimeError:
            if any(map(is_mapped, self._of(node))):
                return None  # a run of the graph fails as well, and is told in our words
            raise
        if isinstance(value, torch.Tensor) and value.numel() > _LARGE:
            read = sum(map(self._size, self._read(node)))
            if value.numel() > 2 * read:
                return None
        self._values[node] = value
        return value

    def _may(self, node: fx.Node) -> bool:
        if not isinstance(node.target, OpOverload) and node.op != "call_function":
            return False
        if isinstance(node.target, OpOverload) and _is_random(node.target):
            return False
        return all(source in self._values for source in self._read(node))

    def _read(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose values ``node`` depends on."""
        is_new = node.target in _NEW and _like(node.args[0]) is not None
        return [n for n in node.all_input_nodes if not (is_new and n is node.args[0])]

    def _value(self, node: fx.Node) -> Any:
        return self._values[node] if node in self._values else _like(node)

    def _of(self, node: fx.Node) -> list[Any]:
        return [self._values.get(source) for source in node.all_input_nodes]

    def _size(self, node: fx.Node) -> int:
        value = self._values[node]
        return value.numel() if isinstance(value, torch.Tensor) else 0


def is_mapped(value: Any) -> bool:
    """Whether ``value`` is of a function that ``torch.vmap`` maps, which nothing outside of it can read.

    >>> is_mapped(torch.zeros(1))
    False
    """
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_batchedtensor(value)


def _like(node: Any) -> torch.Tensor | None:
    """A tensor without elements, of the dtype and on the device of a node's value."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    return torch.empty(0, dtype=value.dtype, device=value.device)


def _is_random(overload: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in overload.tags or overload.namespace != "aten"
