"""How the call of an exported graph reads in a model: for records whose aten overloads take other arguments.

A record says so itself: ``respelled`` is the call that a symbolic trace would show, ``rebuilt`` the module
that holds the tensors of the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from backquant.graph.export import Call


def function_call(target: Any, *args: Any, **kwargs: Any) -> Call:
    """A call without trailing arguments that are ``None``.

    >>> function_call(torch.relu, "x", None).args
    ('x',)
    """
    values = list(args)
    while values and values[-1] is None:
        values.pop()
    return Call("call_function", target, tuple(values), kwargs)


def method_call(name: str, x: Any, sizes: Any) -> Call:
    """A method that takes its sizes or axes one by one.

    >>> method_call("view", "x", [2, -1]).args
    ('x', 2, -1)
    """
    return Call("call_method", name, (x, *sizes))


def given(*values: Any) -> bool:
    """Whether these are tensors of the model, or absent."""
    return all(value is None or isinstance(value, torch.Tensor) for value in values)


def filled(module: nn.Module, **tensors: Any) -> nn.Module:
    """``module`` with the tensors as its parameters."""
    for name, value in tensors.items():
        if value is not None and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)  # noqa: PLW2901
        setattr(module, name, value)
    return module


def sizes(value: Any) -> Any:
    """A tuple, or one number for all dimensions."""
    values = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return values[0] if len(values) == 1 else values
