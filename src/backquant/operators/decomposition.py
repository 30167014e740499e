"""What decomposition makes of an operator, and how it reads as one call again.

Export keeps ``linear``, ``conv2d``, ``batch_norm`` and the like; ``run_decompositions`` does not. The record
of an operator says in which call each of its decompositions ends; here is what reading them takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import fx

#: An overload and its arguments.
AtenCall: TypeAlias = tuple[Any, tuple[Any, ...]]


@dataclass(frozen=True)
class Decomposition:
    """Calls that are one operator together, by the overload of the last one.

    ``read``: that operator's call, from the last node; ``None`` where the calls are something else.
    ``is_item``: the operator's result is item 0 of the last call. ``stands_for_it``: an entry of a backend
    that names the overload means the operator.
    """

    ends_in: Any
    read: Callable[[fx.Node], AtenCall | None]
    is_item: bool = False
    stands_for_it: bool = False


def first_result(ends_in: Any, read: Callable[..., AtenCall]) -> Decomposition:
    """An operator that gives a tuple, of which item 0 is read; ``read`` takes its arguments."""
    return Decomposition(ends_in, lambda node: read(*node.args), is_item=True)


def is_parameter(value: Any) -> bool:
    """Whether it is a parameter of the exported model."""
    return isinstance(value, fx.Node) and value.op == "placeholder" and value.name.startswith("p_")


def is_state(value: Any) -> bool:
    """Whether it is a tensor of the exported model: a parameter, a buffer or a constant."""
    names = ("p_", "b_", "c_")
    return isinstance(value, fx.Node) and value.op == "placeholder" and value.name.startswith(names)


def shape_of(value: Any) -> tuple[Any, ...] | None:
    """The shape of a node's tensor; ``None`` for what is no tensor."""
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    return tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else None


def calls(value: Any, target: Any) -> bool:
    """Whether it is a node that calls ``target``."""
    return isinstance(value, fx.Node) and value.target is target


def with_target(values: Any, target: Any) -> tuple[Any, Any]:
    """(other, call), where ``call`` calls ``target``; ``(None, None)`` if neither value does."""
    if len(values) != 2:
        return None, None
    for one, other in (values, tuple(reversed(values))):
        if calls(other, target) and isinstance(one, fx.Node):
            return one, other
    return None, None
