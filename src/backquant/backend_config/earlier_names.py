"""Fields that had another name in earlier versions: it is still taken, with a ``DeprecationWarning``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from backquant.backend_config.checks import renamed
from backquant.backend_config.declared import declared

Class = TypeVar("Class", bound=type)


def earlier_names(cls: Class) -> Class:
    """A decorator of records: keywords and attributes also by their ``Earlier`` names.

    >>> from backquant.backend_config import LeaveFloat
    >>> with warnings.catch_warnings(record=True) as heard:
    ...     warnings.simplefilter("always")
    ...     LeaveFloat(("add",), beside_float=True).unless_between_quantized
    True
    >>> print(heard[0].message)
    LeaveFloat: 'beside_float' is called 'unless_between_quantized' now
    """
    names = {field.earlier: field.name for field in declared(cls) if field.earlier}
    original: Callable[..., None] = getattr(cls, "__init__")  # noqa: B009 - mypy takes no attribute

    @functools.wraps(original)
    def take_either(self: Any, *args: Any, **values: Any) -> None:
        for earlier, name in names.items():
            if earlier in values:
                _warn(cls, earlier, name)
                values = renamed(values, earlier, name)
        original(self, *args, **values)

    setattr(cls, "__init__", take_either)  # noqa: B010 - nor an assignment
    for earlier, name in names.items():
        setattr(cls, earlier, property(functools.partial(_read, cls, earlier, name)))
    return cls


def _read(cls: type, earlier: str, name: str, instance: Any) -> Any:
    _warn(cls, earlier, name)
    return getattr(instance, name)


def _warn(cls: type, earlier: str, name: str) -> None:
    message = f"{cls.__name__}: {earlier!r} is called {name!r} now"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
