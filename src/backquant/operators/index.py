"""From any spelling of an operator to its record, in constant time."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any

from torch import nn
from torch._ops import OpOverload

from backquant.entry_points import read_entry_point
from backquant.errors import SpecError, did_you_mean
from backquant.operators import (
    activation,
    attention,
    conv,
    dropout,
    elementwise,
    embedding,
    fixed_qparams,
    grouped,
    linear,
    norm,
    pooling,
    recurrent,
    shape,
)
from backquant.operators.operator import Operator, QParamsRule

_GROUP = "backquant.operators"
_FIX = "Operator(name, family, Sample(), modules=..., functions=..., aten=...)"
_FAMILIES = (
    conv,
    linear,
    grouped,
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
    """Every operator, family by family, then those of other packages: the entry points of the group
    ``backquant.operators``, each of which names an ``Operator``.

    Raises SpecError for an entry point that is no ``Operator``, or has the name of another one.

    >>> [o.name for o in all_operators()][:3]
    ['conv1d', 'conv2d', 'conv3d']
    """
    found = [operator for family in _FAMILIES for operator in family.OPERATORS]
    for point in metadata.entry_points(group=_GROUP):
        operator = read_entry_point(point, Operator, "operator", SpecError, _FIX)
        if operator in found:  # one package that is found twice
            continue
        if any(operator.name == other.name for other in found):
            raise SpecError(
                f"there is an operator {operator.name!r} already",
                where=f"entry point {point.name} = {point.value!r} of the group {_GROUP}",
                fix="give the record another name",
            )
        found.append(operator)
    return tuple(found)


def spellings(*names: str) -> tuple[Any, ...]:
    """Every module, function and method of the operators of these names: what a description lists.

    Raises SpecError for a name that no operator has.

    >>> spellings("relu6", "view")
    (<class 'torch.nn.modules.activation.ReLU6'>, <function relu6 at ...>, 'view')
    """
    return tuple(spelling for name in names for spelling in named(name).calls)


def overloads(*names: str) -> frozenset[Any]:
    """Every functional aten overload of the operators of these names, also those with other arguments.

    >>> import torch
    >>> overloads("squeeze") >= {torch.ops.aten.squeeze.dim, torch.ops.aten.squeeze.default}
    True
    """
    packets = {listed._overloadpacket for name in names for listed in named(name).aten}
    found = (getattr(packet, each) for packet in packets for each in packet.overloads())
    return frozenset(each for each in found if not each._schema.is_mutable)


def named(name: str) -> Operator:
    """The record of this name. Raises SpecError where there is none.

    >>> named("rellu6")
    Traceback (most recent call last):
    backquant.errors.SpecError: no operator is called 'rellu6'
      where  operator 'rellu6'
      fix    did you mean 'relu6'?
    """
    known = _by_name().get(name)
    if known is None:
        raise SpecError(
            f"no operator is called {name!r}",
            where=f"operator {name!r}",
            fix=did_you_mean(name, _by_name(), "one of the records of backquant.operators"),
        )
    return known


def moves_values(target: Any) -> bool:
    """Whether what ``target`` (any spelling) gives are values of its arguments and nothing else.

    An aten overload that no record lists goes by the name of its operator.

    >>> import torch
    >>> moves_values("view"), moves_values(torch.ops.aten.roll.default), moves_values(torch.relu)
    (True, True, False)
    """
    known = find(target)
    if known is None and isinstance(target, OpOverload) and target.namespace == "aten":
        known = _by_name().get(target._opname)
    return known is not None and known.moves_values


def gives_items(target: Any) -> bool:
    """Whether an operator (any spelling) gives a list of tensors.

    >>> import torch
    >>> gives_items(torch.split), gives_items("chunk"), gives_items(torch.cat)
    (True, True, False)
    """
    known = find(target)
    return known is not None and known.gives_items


def gives_truths(target: Any) -> bool:
    """Whether an operator (any spelling) makes truths or positions of values, which have no qparams.

    >>> import torch
    >>> gives_truths(torch.argmax), gives_truths("gt"), gives_truths("size")
    (True, True, False)
    """
    known = find(target)
    return known is not None and known.qparams is QParamsRule.TRUTHS


def shares_all_inputs(target: Any) -> bool:
    """Whether all tensors that an operator (any spelling) reads share their qparams with its output.

    >>> import torch
    >>> shares_all_inputs(torch.maximum), shares_all_inputs(torch.relu)
    (True, False)
    """
    known = find(target)
    return known is not None and known.qparams is QParamsRule.INPUTS


def computes_on_activations(target: Any) -> bool:
    """Whether an operator (any spelling) is arithmetic of which every tensor may be an activation.

    >>> import torch
    >>> computes_on_activations(torch.matmul), computes_on_activations(torch.nn.functional.linear)
    (True, False)
    """
    known = find(target)
    return known is not None and known.family == "elementwise"


@cache
def _by_name() -> dict[str, Operator]:
    return {operator.name: operator for operator in all_operators()}


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
                raise SpecError(
                    f"{spelling!r} is a spelling of {owner.name} and of {operator.name}",
                    where=f"entry points of the group {_GROUP}, or backquant.operators",
                    fix="leave it to one of the two records",
                )
    return table


@cache
def _by_derived() -> dict[type[nn.Module], Operator]:
    return {cls: operator for operator in all_operators() for cls in operator.derived}
