"""The command line: parses arguments, calls the API, prints. ``python -m backquant`` works too."""

from __future__ import annotations

import signal
import sys
from typing import Any

__all__ = ["main"]

_INTERRUPTED = 130  # 128 + SIGINT, as shells say it


class _Interrupt(BaseException):
    """ctrl-C. No KeyboardInterrupt, which libraries on the way turn into words of their own."""


def main() -> None:
    """Entry point of the ``backquant`` command."""
    pressed = False

    def interrupt(*_: Any) -> None:
        nonlocal pressed
        pressed = True
        raise _Interrupt

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else it is ignored, as in the background
        signal.signal(signal.SIGINT, interrupt)
    try:
        from backquant.cli.app import app

        app()
    except BaseException:
        if not pressed:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN if pressed else before)
    if pressed:
        print("interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)
