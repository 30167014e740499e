"""Dataclasses as JSON-able values and back, by the types of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import torch

_hints = cache(get_type_hints)


def plain_data(value: Any) -> Any:
    """Dataclasses become dicts, tuples lists, dtypes and enums their names.

    >>> plain_data((torch.int8, {"shape": (2, 3)}))
    ['int8', {'shape': [2, 3]}]
    """
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

    >>> from_plain_data(tuple[torch.dtype, ...], ["int8"]), from_plain_data(int | None, None)
    ((torch.int8,), None)
    """
    arguments, origin = get_args(kind), get_origin(kind)
    if NoneType in arguments:
        return None if value is None else from_plain_data(arguments[0], value)
    if origin is tuple:
        return tuple(from_plain_data(arguments[0], item) for item in value)
    if origin in (dict, Mapping):
        return {key: from_plain_data(arguments[1], item) for key, item in value.items()}
    if is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        return kind(**{name: from_plain_data(hints[name], item) for name, item in value.items()})
    if issubclass(kind, tuple):
        return kind(*map(from_plain_data, _hints(kind).values(), value))
    if kind is torch.dtype:
        return getattr(torch, value)
    return kind(value) if issubclass(kind, Enum) else value
