"""Output and exit statuses that every command shares.

Exit status: 0 done, 1 the answer is no (a check failed, backends differ, coverage too low), 2 bad usage.
Standard output holds the answer and nothing else: text, or with ``--json`` one JSON document (for an
error ``{"error": {…}}``). Progress, remarks and messages of errors go to standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from backquant.errors import BackquantError, CoverageError, UsageError

if TYPE_CHECKING:  # rich takes longer to import than a command without tables runs
    from rich.console import Console

DONE, NO, USAGE = 0, 1, 2
WIDTH = 140  # of tables in files and pipes; COLUMNS overrides it


def console(*, stderr: bool = False) -> Console:
    """A console as wide as the terminal, or ``WIDTH`` columns where there is none."""
    from backquant.pages.console import SafeConsole

    stream = sys.stderr if stderr else sys.stdout
    fixed = not stream.isatty() and "COLUMNS" not in os.environ
    return SafeConsole(file=stream, width=WIDTH if fixed else None, highlight=False)


def print_parts(target: Console, *shown: object) -> None:
    """Print tables as wide as ``target``; lines of text are wrapped on terminals only."""
    from backquant.pages.text import render, renderable

    if target.is_terminal:
        target.print(renderable(*shown))
    else:
        target.file.write(render(*shown, width=target.width) + "\n")


def emit(*shown: object, as_json: bool, data: Any) -> None:
    """Print ``data`` as JSON, or what a person reads, on standard output: documents, their parts, texts."""
    if as_json:
        import json

        print(json.dumps(data, indent=2, allow_nan=False))
    else:
        from backquant.cli.syntax import document_in_options

        print_parts(console(), *document_in_options(shown))


def note(text: str) -> None:
    """A remark on standard error, so that output stays clean for pipes."""
    _say(text, "dim")


def _say(text: str, style: str) -> None:
    from rich.text import Text

    console(stderr=True).print(Text(text, style=style), soft_wrap=True)


def stop(status: int) -> NoReturn:
    """End the command with this exit status."""
    raise typer.Exit(status)


@contextmanager
def only_answers() -> Iterator[None]:
    """What the block writes to the standard output of the process goes to standard error: solvers in C++
    do, and metrics that print."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
        os.fstat(2)
    except OSError:  # the process has not both
        yield
        return
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        if os.name == "posix":
            import ctypes

            ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def _named_files() -> Iterator[None]:
    """A file that cannot be written or read is the user's to mend: a full disk, permissions."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BackquantError) or not error.filename or not error.strerror:
            raise
        raise UsageError(
            f"{error.filename}: {error.strerror}",
            where="a file that the command writes or reads",
            fix="make room, or name a file that can be written",
        ) from error


@contextmanager
def guarded(*, as_json: bool = False) -> Iterator[None]:
    """Turn an error of ours into its message on standard error and the right exit status."""
    try:
        with _named_files():
            yield
    except BackquantError as error:
        from backquant.cli.syntax import in_options

        told = BackquantError(error.what, where=in_options(error.where), fix=in_options(error.fix))
        _say(f"error: {told}", "red")
        if as_json:
            kind = type(error).__name__
            import json

            parts = {"kind": kind, "what": told.what, "where": told.where, "fix": told.fix}
            print(json.dumps({"error": parts}, indent=2))
        raise typer.Exit(NO if isinstance(error, CoverageError) else USAGE) from error
