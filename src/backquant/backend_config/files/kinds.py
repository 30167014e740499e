"""What a description may name: classes of modules, operators of tensors, fusers and observers of ours.

A fuser, a factory and a module class are called when a model is quantized; so what torch has beside modules
and operators (loaders, compilers, its C functions) is no name of a description, although it lies in torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import get_overridable_functions

__all__ = ["IMPORTED", "is_named", "is_operator"]

# Rooms whose modules are imported when a file names what is in them: they define, and do nothing else.
IMPORTED = tuple(
    f"backquant.{room}" for room in ("backend_config", "nn", "observe", "operators", "qconfig")
)
_MODULES = ("torch.nn.modules.", "torch.ao.nn.", "backquant.nn.")
_CALLED = tuple(f"{room}." for room in IMPORTED)
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme, bool, int, float, str)
_HOMES = (torch.nn.functional, torch.functional)
_KINDS = (FunctionType, BuiltinFunctionType, MethodDescriptorType)
_NOT_OPERATORS = frozenset({"from_file", "from_numpy", "frombuffer"})


def is_named(found: Any, path: str) -> bool:
    """Whether a description may name ``found``, which ``path`` led to.

    >>> is_named(nn.Conv2d, "torch.nn.Conv2d"), is_named(torch.add, "torch.add")
    (True, True)
    >>> is_named(torch.load, "torch.load"), is_named(torch._C._abort, "torch._C._abort")
    (False, False)
    """
    if isinstance(found, _CONSTANTS):
        return True
    home = f"{getattr(found, '__module__', '')}."
    if isinstance(found, type) and issubclass(found, nn.Module):
        return home.startswith((*_MODULES, *_CALLED))
    if isinstance(found, (type, FunctionType)) and home.startswith(_CALLED):
        return True
    if path.startswith("builtins."):
        return True  # a list of its own, in ``names``
    return is_operator(found)


def is_operator(found: Any) -> bool:
    """Whether ``found`` computes with tensors: a registered operator, a function or method of torch.

    >>> is_operator(torch.relu), is_operator(torch.ops.aten.relu.default), is_operator(nn.ReLU)
    (True, True, False)
    """
    if isinstance(found, (OpOverload, OpOverloadPacket)):
        return True
    name = getattr(found, "__name__", "")
    if not callable(found) or name in _NOT_OPERATORS:
        return False
    if getattr(operator, name, None) is found:
        return isinstance(found, BuiltinFunctionType) and name != "call"
    return isinstance(found, _KINDS) and found in _operators()


@cache
def _operators() -> frozenset[Callable[..., Any]]:
    """Functions of torch on tensors, and methods of tensors."""
    known = [f for functions in get_overridable_functions().values() for f in functions]
    natives = torch._C._VariableFunctions
    known += [getattr(natives, name) for name in dir(natives) if not name.startswith("__")]
    for home in _HOMES:
        for value in vars(home).values():
            is_own = isinstance(value, FunctionType) and value.__module__ == home.__name__
            if is_own or isinstance(value, BuiltinFunctionType):
                known.append(value)
    return frozenset(f for f in known if isinstance(f, _KINDS))
