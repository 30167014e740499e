"""From any spelling of an operator to its record, in constant time."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from backquant.operators import (
    activation,
    attention,
    conv,
    dropout,
    elementwise,
    embedding,
    fixed_qparams,
    linear,
    norm,
    pooling,
    recurrent,
    shape,
)
from backquant.operators.operator import Operator

__all__ = ["all_operators", "find", "find_root", "module_for_call"]

_FAMILIES = (
    conv,
    linear,
    norm,
    elementwise,
    attention,
    activation,
    fixed_qparams,
    pooling,
    shape,
    recurrent,
    embedding,
    dropout,
)


@cache
def all_operators() -> tuple[Operator, ...]:
    """Every operator, family by family.

    >>> [o.name for o in all_operators()][:3]
    ['conv1d', 'conv2d', 'conv3d']
    """
    return tuple(operator for family in _FAMILIES for operator in family.OPERATORS)


def find(spelling: Any) -> Operator | None:
    """The operator that ``spelling`` (class, callable, method name, aten overload) calls.

    ``None`` if no family knows it. Fused, QAT and reference classes are no spellings: see
    ``find_root``.

    >>> import torch
    >>> find("view").name, find(torch.ops.aten.add.Tensor).name, find(print)
    ('view', 'add', None)
    """
    try:
        return _by_spelling().get(spelling)
    except TypeError:  # an unhashable target is no spelling
        return None


def find_root(cls: type[nn.Module]) -> Operator | None:
    """The operator at the root of a module class: its own, or that of a fused, QAT, reference one.

    >>> from backquant.nn import intrinsic
    >>> find_root(intrinsic.ConvReLU2d).name, find_root(nn.Conv2d).name, find_root(nn.Module)
    ('conv2d', 'conv2d', None)
    """
    return _by_spelling().get(cls) or _by_derived().get(cls)


def module_for_call(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module | None:
    """A module that does what the call ``target(x, *args, **kwargs)`` does to ``x``.

    Fusers take modules; a functional tail of a pattern (``F.leaky_relu(x, 0.2)``) becomes one
    with the settings of its call. ``None`` for an operator that has no such module.

    >>> import torch
    >>> module_for_call(torch.nn.functional.leaky_relu, (0.2,), {})
    LeakyReLU(negative_slope=0.2)
    """
    operator = find(target)
    if operator is None or operator.as_module is None:
        return None
    return operator.as_module(*args, **kwargs)


@cache
def _by_spelling() -> dict[Any, Operator]:
    table: dict[Any, Operator] = {}
    for operator in all_operators():
        for spelling in operator.spellings:
            owner = table.setdefault(spelling, operator)
            if owner is not operator:
                raise AssertionError(
                    f"{spelling!r} is a spelling of {owner.name} and of {operator.name}"
                )
    return table


@cache
def _by_derived() -> dict[type[nn.Module], Operator]:
    return {cls: operator for operator in all_operators() for cls in operator.derived}
