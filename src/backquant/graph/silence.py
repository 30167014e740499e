"""Silence for one thread: warnings and log records of what it calls, while other threads keep theirs.

``warnings.catch_warnings`` and ``logging.disable`` are of the whole process. Here a filter of warnings, and
what hands log records on, ask which thread calls: to all others they are as they were.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from backquant.graph.own_thread import capture_in_own_thread, printing_nowhere, replaced


@contextmanager
def without_warnings(*categories: type[Warning]) -> Iterator[None]:
    """Warnings of these categories (default: all) that this thread raises in the block are dropped.

    >>> with without_warnings():
    ...     warnings.warn("unheard", DeprecationWarning)
    """
    thread: list[int | None] = [threading.get_ident()]

    class OwnThread(type):
        def __subclasscheck__(cls, category: type) -> bool:
            here = thread[0] == threading.get_ident()
            return here and issubclass(category, categories or Warning)

    class Unheard(Warning, metaclass=OwnThread):
        """A category to which, in this thread, all the others belong."""

    before = warnings.filters
    warnings.simplefilter("ignore", Unheard)
    try:
        yield
    finally:
        thread[0] = None  # copies of the filters that others made meanwhile now match no thread
        for filters in (before, warnings.filters):
            filters[:] = [known for known in filters if known[2] is not Unheard]  # type: ignore[index]
        getattr(warnings, "_filters_mutated", lambda: None)()


@contextmanager
def without_log_records() -> Iterator[None]:
    """Log records of this thread up to warnings that the root logger would get are dropped, and those that
    PyTorch writes to stderr by handlers of its own, unless somebody asked for more than warnings.

    >>> with without_log_records():
    ...     logging.getLogger("exporter").warning("unheard")
    """
    handle = logging.Logger.handle

    def handled(logger: logging.Logger, record: logging.LogRecord) -> None:
        is_heard = record.levelno > logging.WARNING
        if is_heard or not (_reaches_the_root(logger) or _is_torchs_own(logger)):
            handle(logger, record)

    with replaced(logging.Logger, "handle", here=handled):
        yield


def _reaches_the_root(logger: logging.Logger) -> bool:
    while logger.parent is not None:
        if not logger.propagate:
            return False
        logger = logger.parent
    return True


def _is_torchs_own(logger: logging.Logger) -> bool:
    """Whether records go nowhere but to the streams that PyTorch gave its loggers."""
    own: logging.Logger | None = logger
    if logger.name.partition(".")[0] != "torch" or logger.getEffectiveLevel() < logging.WARNING:
        return False
    while own is not None:
        if any(type(handler) is not logging.StreamHandler for handler in own.handlers):
            return False
        own = own.parent if own.propagate else None
    return True


# Silence for other people's exporters and compilers.


@contextmanager
def quiet() -> Iterator[None]:
    """Deprecations and remarks inside of torch's and other exporters are no news for our users.

    Other threads run their models meanwhile as if nothing were exported.
    """
    unheard = without_warnings(DeprecationWarning, FutureWarning, UserWarning)
    with capture_in_own_thread(), unheard, without_log_records(), printing_nowhere():
        yield
