"""Output and exit statuses that every command shares: 0 done, 1 the answer is no, 2 bad usage."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console, RenderableType

from backquant.errors import BackquantError, CoverageError

__all__ = ["DONE", "NO", "USAGE", "emit", "guarded", "note", "stop"]

DONE, NO, USAGE = 0, 1, 2


def emit(*, as_json: bool, data: Any, shown: RenderableType) -> None:
    """Print ``data`` as JSON, or what a person reads, on standard output."""
    if as_json:
        print(json.dumps(data, indent=2, default=str))
    else:
        Console(soft_wrap=not sys.stdout.isatty()).print(shown)


def note(text: str) -> None:
    """A remark on standard error, so that output stays clean for pipes."""
    Console(stderr=True, highlight=False).print(text, style="dim", markup=False)


def stop(status: int) -> NoReturn:
    raise typer.Exit(status)


@contextmanager
def guarded() -> Iterator[None]:
    """Turn an error of ours into its message on standard error and the right exit status."""
    try:
        yield
    except BackquantError as error:
        console = Console(stderr=True, highlight=False)
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(NO if isinstance(error, CoverageError) else USAGE) from error
