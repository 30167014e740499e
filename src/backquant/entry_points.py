"""What other packages offer under a name: their entry points, read one at a time."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import TypeVar

from backquant.errors import BackquantError

_T = TypeVar("_T")


def read_entry_point(
    point: EntryPoint, kind: type[_T], what: str, error: type[BackquantError], fix: str
) -> _T:
    """The object that ``point`` names, a ``kind``; ``what`` it is in words.

    Raises ``error`` where it cannot be imported or is something else; ``fix`` shows how one is made.

    >>> from backquant.errors import ConfigError
    >>> point = EntryPoint("pi", "math:pi", "numbers")
    >>> read_entry_point(point, float, "number", ConfigError, "3.14")
    3.141592653589793
    """
    place = f"entry point {point.name} = {point.value!r} of the group {point.group}"
    try:
        found = point.load()
    except Exception as problem:
        raise error(
            f"the {what} {point.name!r} of an installed package cannot be read: {problem}",
            where=place,
            fix=f"python -c 'import {point.module}'",
        ) from problem
    if not isinstance(found, kind):
        raise error(
            f"the {what} {point.name!r} of an installed package is a {type(found).__name__}",
            where=place,
            fix=fix,
        )
    return found
