"""The keywords that a call of a file may have: those of an operator's schema or a function's signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from types import FunctionType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from backquant.artifact.names import check_keyword, shown
from backquant.errors import ArtifactError

# Of torch's Python functions that C++ parses, beside what schemas have.
_ALSO = frozenset({"axis", "axes", "keepdims", "x1", "x2", "requires_grad", "device", "pin_memory"})


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
        own = inspect.signature(target).parameters.values()
        named = {p.name for p in own if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        takes_any = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in own)
        return frozenset(named) | (_of_torch() if takes_any else frozenset())
    return _of_torch()


def _names(schemas: list[Any]) -> frozenset[str]:
    return frozenset(argument.name for schema in schemas for argument in schema.arguments)


@cache
def _of_torch() -> frozenset[str]:
    """Of bindings in C++, which take what any ``aten`` schema has."""
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")]
    return _names(schemas) | _ALSO
