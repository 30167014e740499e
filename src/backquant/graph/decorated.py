"""Decorated ``forward`` methods, as a trace can call them.

``torch.fx`` reads the arguments of the function within (``__wrapped__``), and calls the decorator with them
by position. Where the function takes ``*args``, ``**kwargs`` or arguments by keyword, it rewrites the code of
what it calls for that: of a decorator's ``wrapper(self, *args, **kwargs)`` it makes another function (models
of transformers: "'NoneType' object has no attribute 'get'"; torch 2.13).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["as_declared"]

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def as_declared(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """``forward`` as a function with the arguments that it names; others, of ``*args`` and ``**kwargs``, are
    none. Those with defaults are handed on by keyword, as decorators expect that add to ``kwargs`` what is
    left out. ``None`` where it can be traced as it is.

    >>> import functools
    >>> def plain(self, x, *, y=2, **more):
    ...     return x + y
    >>> @functools.wraps(plain)
    ... def decorated(self, *args, **kwargs):
    ...     return plain(self, *args, **kwargs)
    >>> as_declared(plain) is None
    True
    >>> made = as_declared(decorated)
    >>> inspect.signature(made), made(None, 1)
    (<Signature (self, x, *, y=2)>, 3)
    """
    inner = inspect.unwrap(forward)
    given = list(inspect.signature(inner).parameters.values())
    named = [each for each in given if each.kind in _BY_POSITION]
    keywords = [each.name for each in given if each.kind is inspect.Parameter.KEYWORD_ONLY]
    if inner is forward or len(named) == len(given):
        return None
    head = ", ".join([*(each.name for each in named), *(["*", *keywords] if keywords else [])])
    first = [each.name for each in named if _is_by_position(each)]
    later = [each.name for each in named if not _is_by_position(each)]
    call = ", ".join([*first, *(f"{name}={name}" for name in (*later, *keywords))])
    source = (
        f"def made(_called):\n def forward({head}):\n  return _called({call})\n return forward\n"
    )
    found: dict[str, Any] = {}
    exec(
        source, inner.__globals__, found
    )  # its globals are where a trace looks for functions to record
    made: Any = found["made"](forward)
    made.__defaults__ = inner.__defaults__
    made.__kwdefaults__ = inner.__kwdefaults__
    made.__doc__, made.__qualname__ = inner.__doc__, inner.__qualname__
    return made  # type: ignore[no-any-return]


def _is_by_position(parameter: inspect.Parameter) -> bool:
    no_name = parameter.kind is inspect.Parameter.POSITIONAL_ONLY
    return no_name or parameter.default is inspect.Parameter.empty
