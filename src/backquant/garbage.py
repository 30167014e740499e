"""Python's collector of garbage goes through fewer objects while graphs are made.

Capturing, planning and lowering make hundreds of thousands of objects that stay. As CPython is set by
default, its collector goes through the young ones for each 700 that are made, and through all of the process
again and again: up to a third of the time of ``quantize``. What is garbage is still collected, in larger
portions.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

#: As of ``gc.set_threshold``: objects made between two collections of the young ones; such collections
#: between two of those that survived one; and of these between two of all.
_RARELY = (50_000, 20, 1_000)
_lock = threading.Lock()
_inside = 0  # blocks that are entered, of all threads
_before = _RARELY


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Objects are collected rarely in this block, in all threads; behind the last such block as before.

    Thresholds that are larger stay.

    >>> before = gc.get_threshold()
    >>> with collected_rarely():
    ...     gc.get_threshold()[0] >= 50_000
    True
    >>> gc.get_threshold() == before
    True
    """
    global _inside, _before  # noqa: PLW0603 the collector has one setting for the process
    with _lock:
        if _inside == 0:
            _before = gc.get_threshold()
            gc.set_threshold(*map(_rarer, _before, _RARELY))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                gc.set_threshold(*_before)


def makes_graphs(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """``function``, during which objects are ``collected_rarely``.

    >>> makes_graphs(gc.get_threshold)()[0] >= 50_000
    True
    """

    @wraps(function)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with collected_rarely():
            return function(*args, **kwargs)

    return run


def _rarer(threshold: int, least: int) -> int:
    return threshold if threshold == 0 else max(threshold, least)  # 0: never
