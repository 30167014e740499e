"""Silence for other people's exporters and compilers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from backquant.graph.own_thread import capture_in_own_thread, printing_nowhere
from backquant.graph.silence import without_log_records, without_warnings


@contextmanager
def quiet() -> Iterator[None]:
    """Deprecations and remarks inside of torch's and other exporters are no news for our users.

    Other threads run their models meanwhile as if nothing were exported.
    """
    unheard = without_warnings(DeprecationWarning, FutureWarning, UserWarning)
    with capture_in_own_thread(), unheard, without_log_records(), printing_nowhere():
        yield
