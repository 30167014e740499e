"""The command ``migrate``: from ``torch.ao.quantization`` to backquant, file by file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from backquant.cli.console import DONE, NO, console, emit, guarded, note, stop


def migrate(
    paths: Annotated[list[Path], typer.Argument(help="Files or folders.", metavar="PATH")],
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if anything is to be done.")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Write nothing; print the changes as a patch.")
    ] = False,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", help="Name, or path below PATH, to skip; * and ? are wildcards."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of text.")] = False,
) -> None:
    """Rewrite code that uses torch.ao.quantization, and list what has to be done by hand.

    Python files and notebooks: imports, calls, dict configs. Exit 1 while something needs a person.
    """
    with guarded(as_json=as_json):
        from backquant.migrate import migrate_paths, report_text

        with _progress(quiet=as_json) as progress:
            migration = migrate_paths(
                paths, exclude=exclude or (), write=not (check or diff), progress=progress
            )
    if diff and not as_json:
        sys.stdout.write(migration.diff())
        note(report_text(migration))
    else:
        data = migration.to_dict() | ({"diff": migration.diff()} if diff else {})
        emit(report_text(migration), as_json=as_json, data=data)
    left = not migration.is_clean if check or diff else bool(migration.findings)
    stop(NO if left else DONE)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, where that is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("migrating"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console(stderr=True),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )
    task = bar.add_task("migrating", total=None)
    with bar:
        yield lambda done, total: bar.update(task, completed=done, total=total)
