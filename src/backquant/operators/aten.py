"""From the aten operators of an exported graph to the spellings that entries of backends use.

An overload belongs to the operator that lists it. Its call is that of the operator's canonical spelling,
with the same arguments, where the record has no call of its own for it.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import fx, nn

from backquant.graph.export import Call
from backquant.operators.composed import composed
from backquant.operators.index import all_operators, find
from backquant.operators.operator import Operator


class AtenSpeller:
    """The table of ``backquant.operators`` as ``backquant.graph`` asks for it.

    >>> speller = AtenSpeller()
    >>> speller.call(torch.ops.aten.add.Tensor, (1, 2), {}).target is operator.add
    True
    >>> speller.call(torch.ops.aten.bmm.default, (1, 2), {}).target is torch.matmul
    True
    """

    def composed(self, node: fx.Node) -> fx.Node | None:
        """See ``backquant.operators.composed``."""
        return composed(node)

    def call(self, overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | None:
        """The canonical spelling of a call; ``None`` for an overload that no operator lists."""
        owner = _respelled().get(overload)
        if owner is not None:
            return owner.respelled[overload](*args, **kwargs)
        known = find(overload)
        target = None if known is None else canonical(known)
        if target is None:
            return None
        if isinstance(target, str):
            return Call("call_method", target, args, kwargs)
        if kwargs and target in (operator.add, operator.sub, operator.mul):
            target = getattr(torch, target.__name__)
        return Call("call_function", target, args, kwargs)

    def module(
        self, overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> nn.Module | None:
        """See ``rebuilt_module``."""
        return rebuilt_module(overload, args, kwargs)


def canonical(known: Operator) -> Any:
    """The function, or the name of the method, by which exported graphs show an operator.

    >>> canonical(find("view")), canonical(find(torch.relu)) is torch.nn.functional.relu
    ('view', True)
    """
    return known.exported_as or next(iter((*known.functions, *known.methods)), None)


def rebuilt_module(
    overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> nn.Module | None:
    """The module that does what the call does to its first argument, with the tensors of the call:
    exported programs hold the tensors of a model and not its modules.

    Args:
        overload: an aten operator.
        args, kwargs: of the call; tensors where the model's own stand, anything else for the input.

    Returns ``None`` for an operator without such a module, or with a computed weight.

    >>> weight = torch.ones(3, 2)
    >>> module = rebuilt_module(torch.ops.aten.linear.default, ("x", weight), {})
    >>> module, module.weight.data_ptr() == weight.data_ptr()
    (Linear(in_features=2, out_features=3, bias=False), True)
    """
    owner = _rebuilt().get(overload)
    if owner is not None:
        return owner.rebuilt[overload](*args, **kwargs)
    known = find(overload)
    if known is None or known.as_module is None:
        return None
    return known.as_module(*args[1:], **kwargs)


@cache
def _respelled() -> dict[Any, Operator]:
    return {overload: known for known in all_operators() for overload in known.respelled}


@cache
def _rebuilt() -> dict[Any, Operator]:
    return {overload: known for known in all_operators() for overload in known.rebuilt}
