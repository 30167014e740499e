"""Conditions of a spec file, with the place of what is wrong in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backquant.backend_config.conditions import Condition, condition_from
from backquant.backend_config.files.import_paths import SpellingError
from backquant.errors import SpecError

Accept = Callable[[Condition | None], None]


def _anything(_: Condition | None) -> None:
    """Every condition is accepted."""


def condition_at(data: Any, accept: Accept = _anything) -> Condition | None:
    """The condition of a mapping of the file; ``accept`` raises for one that is not to be there.

    Raises ``SpellingError`` with the path to the entry of the mapping that is wrong.

    >>> print(condition_at({"stride": [1, 2]}))
    stride one of 1, 2
    """
    try:
        condition = condition_from(data)
        accept(condition)
    except SpecError as error:
        raise SpellingError(error.what, error.fix, _place(data, accept)) from error
    return condition


def _place(data: Any, accept: Accept) -> tuple[str | int, ...]:
    """The path to the first part of a condition that is wrong by itself."""
    if not isinstance(data, dict):
        return ()
    for key, value in data.items():
        if _is_sound({key: value}, accept):
            continue
        if key == "not":
            return (key, *_place(value, accept))
        if key in ("all", "any") and isinstance(value, list):
            at = next(i for i, item in enumerate(value) if not _is_sound(item, accept))
            return (key, at, *_place(value[at], accept))
        return (key,)
    return ()


def _is_sound(data: Any, accept: Accept) -> bool:
    try:
        condition = condition_from(data)
        accept(condition)
    except SpecError:
        return False
    return condition is not None
