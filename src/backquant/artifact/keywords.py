"""The keywords that a call of a file may have: those of an operator's schema or a function's signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket

from backquant.artifact.names import check_keyword, shown
from backquant.errors import ArtifactError

# Of torch's Python functions that C++ parses, beside what schemas have.
_ALSO = frozenset(
    {"axis", "axes", "keepdims", "x1", "x2", "data", "requires_grad", "device", "pin_memory"}
)


def check_keywords(
    target: Callable[..., Any] | None, kwargs: Mapping[str, Any], where: str
) -> None:
    """Raises ``ArtifactError`` for a keyword that ``target`` does not have; ``None`` is any method.

    >>> check_keywords(torch.zeros, {"size": [1]}, "node zeros")
    >>> check_keywords(torch.zeros, {"\uff53ize": [1]}, "node zeros")
    Traceback (most recent call last):
    backquant.errors.ArtifactError: '\\uff53ize' is no name of an argument
      where  node zeros
    """
    for name in kwargs:
        check_keyword(name, where)
    wrong = set(kwargs) - _keywords(target) if kwargs else ()
    if wrong:
        raise ArtifactError(f"there is no argument {shown(min(wrong))}", where=where)


@lru_cache(maxsize=4096)
def _keywords(target: Callable[..., Any] | None) -> frozenset[str]:
    if isinstance(target, OpOverload):
        return _names([target._schema])
    if isinstance(target, OpOverloadPacket):
        return _names([getattr(target, name)._schema for name in target.overloads()])
    if isinstance(target, FunctionType):
        named, takes_any = _parameters(target)
        return named | _of_torch() if takes_any else named
    return _of_torch()


def _parameters(function: FunctionType) -> tuple[frozenset[str], bool]:
    """Names of parameters, and whether there may be others."""
    own = inspect.signature(function).parameters.values()
    rest = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    named = frozenset(p.name for p in own if p.kind not in rest)
    return named, len(named) < len(own)


def _names(schemas: list[Any]) -> frozenset[str]:
    return frozenset(argument.name for schema in schemas for argument in schema.arguments)


@cache
def _of_torch() -> frozenset[str]:
    """What ``aten`` schemas and functions of ``torch.nn.functional`` have: of bindings in C++, of methods,
    and of functions that choose another one by their arguments."""
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")]
    functions = [f for f in vars(nn.functional).values() if isinstance(f, FunctionType)]
    return _names(schemas).union(_ALSO, *(_parameters(f)[0] for f in functions))
