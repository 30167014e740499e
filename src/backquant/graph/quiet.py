"""Silence for other people's exporters and compilers."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from backquant.graph.own_thread import capture_in_own_thread

__all__ = ["quiet"]


@contextmanager
def quiet() -> Iterator[None]:
    """Deprecations and remarks inside of torch's and other exporters are no news for our users.

    Other threads run their models meanwhile as if nothing were exported.
    """
    disabled = logging.root.manager.disable
    logging.disable(max(disabled, logging.WARNING))
    try:
        with capture_in_own_thread(), warnings.catch_warnings():
            for category in (DeprecationWarning, FutureWarning, UserWarning):
                warnings.simplefilter("ignore", category)
            yield
    finally:
        logging.disable(disabled)
