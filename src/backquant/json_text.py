"""JSON that others wrote, where whatever is wrong is a ``ValueError``; and dataclasses as JSON holds them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints


def read_json(text: str | bytes, *, strict: bool = True) -> Any:
    """The data in ``text``. A ``ValueError`` for what is no JSON, for an object that has a key twice (readers
    would not agree which one counts), and for lists in lists beyond Python's limit of recursion.

    >>> read_json('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    >>> read_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the key 'a' stands twice in one object
    >>> read_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: it is nested too deeply
    """
    try:
        return json.loads(text, strict=strict, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {ascii(twice)[:80]} stands twice in one object")
    return entries


# Dataclasses as JSON-able values and back, by the types of their fields.

_hints = cache(get_type_hints)


def plain_data(value: Any) -> Any:
    """Dataclasses become dicts, tuples lists, dtypes and enums their names.

    >>> import torch
    >>> plain_data((torch.int8, {"shape": (2, 3)}))
    ['int8', {'shape': [2, 3]}]
    """
    import torch

    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_data(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, dict):
        return {key: plain_data(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain_data(item) for item in value]
    return value


def from_plain_data(kind: Any, value: Any) -> Any:
    """The value of the type ``kind`` that became ``value``.

    Raises ``TypeError``, ``ValueError``, ``KeyError`` or ``AttributeError`` where none did.

    >>> import torch
    >>> from_plain_data(tuple[torch.dtype, ...], ["int8"]), from_plain_data(int | None, None)
    ((torch.int8,), None)
    """
    import torch

    arguments, origin = get_args(kind), get_origin(kind)
    if NoneType in arguments:
        return None if value is None else from_plain_data(arguments[0], value)
    if origin is tuple:
        return tuple(from_plain_data(arguments[0], item) for item in value)
    if origin in (dict, Mapping):
        return {key: from_plain_data(arguments[1], item) for key, item in value.items()}
    if not isinstance(kind, type):
        return value
    if is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: from_plain_data(hints[name], item) for name, item in value.items()})
    if issubclass(kind, tuple):
        return kind(*map(from_plain_data, _hints(kind).values(), value))
    if kind is torch.dtype:
        return getattr(torch, value)
    return kind(value) if issubclass(kind, Enum) else value
