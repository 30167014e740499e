"""A count of changes, so that whoever asks whether modules are as they were compares one number."""

from __future__ import annotations

from collections import OrderedDict
from itertools import count
from typing import Any

_numbers = count(1)


class Counted(OrderedDict[Any, Any]):
    """A table of a module: parameters, buffers, children or hooks. ``last`` is another number after each
    change of any table of this class, and after ``changed()``.

    >>> table, before = Counted({"scale": 1}), Counted.last
    >>> table["scale"] = 2
    >>> Counted.last == before
    False
    """

    last = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        changed()

    def __delitem__(self, key: Any) -> None:
        super().__delitem__(key)
        changed()

    def pop(self, *args: Any) -> Any:
        """As of a dict."""
        value = super().pop(*args)
        changed()
        return value

    def popitem(self, last: bool = True) -> tuple[Any, Any]:
        """As of a dict."""
        item = super().popitem(last)
        changed()
        return item

    def clear(self) -> None:
        """As of a dict."""
        super().clear()
        changed()


def changed() -> None:
    """Count a change: after it was done, so that a look at the same time finds it or looks again."""
    Counted.last = next(_numbers)
