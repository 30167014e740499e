"""The command line: parses arguments, calls the API, prints. ``python -m backquant`` works too."""

from __future__ import annotations

import signal
import sys
from typing import Any

__all__ = ["main"]

_INTERRUPTED = 130  # 128 + SIGINT, as shells say it


class _Interrupt(BaseException):
    """ctrl-C. No KeyboardInterrupt, which libraries on the way turn into words of their own."""


class _SaysLoading:
    """A finder that finds nothing: on a terminal it says that PyTorch is loaded, which takes seconds."""

    def __init__(self) -> None:
        self._is_said = not sys.stderr.isatty()

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "torch" and not self._is_said:
            self._is_said = True
            sys.stderr.write("loading PyTorch …\n")
            sys.stderr.flush()


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
    loading: Any = _SaysLoading()
    sys.meta_path.insert(0, loading)
    try:
        from backquant.cli.app import app

        app()
    except BaseException:
        if not pressed:
            raise
    finally:
        sys.meta_path.remove(loading)
        signal.signal(signal.SIGINT, signal.SIG_IGN if pressed else before)
    if pressed:
        print("interrupted", file=sys.stderr)
        sys.exit(_INTERRUPTED)
