"""The command ``migrate``: from ``torch.ao.quantization`` to backquant, file by file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from backquant.cli.console import DONE, NO, emit, guarded, stop

if TYPE_CHECKING:
    from backquant.migrate import FileResult, Migration

__all__ = ["migrate"]


def migrate(
    paths: Annotated[list[Path], typer.Argument(help="Files or folders.", metavar="PATH...")],
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if needed.")
    ] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Write nothing; print the changes.")] = False,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", help="Name or path pattern to skip.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of text.")] = False,
) -> None:
    """Rewrite code that uses torch.ao.quantization; say what needs a person. Exit 1 if something does."""
    with guarded():
        from backquant.migrate import migrate_paths

        with _progress(quiet=as_json) as progress:
            migration = migrate_paths(
                paths, exclude=exclude or (), write=not (check or diff), progress=progress
            )
    data = migration.to_dict()
    if diff:
        data["diff"] = migration.diff()
        shown = Text(migration.diff() + _report(migration))
    else:
        shown = Text(_report(migration))
    emit(as_json=as_json, data=data, shown=shown)
    left = not migration.is_clean if check or diff else bool(migration.findings)
    stop(NO if left else DONE)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("migrating"),
        BarColumn(),
        MofNCompleteColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=quiet or not sys.stderr.isatty(),
    )
    task = bar.add_task("migrating", total=None)
    with bar:
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _report(migration: Migration) -> str:
    """What became of the files, then what needs a person, then the counts."""
    lines = [f"{_state(result):<13} {result.path}" for result in migration.files if _state(result)]
    findings = migration.findings
    if findings:
        lines += ["", "needs a person", *(str(finding) for finding in findings)]
    counts = migration.to_dict()["counts"]
    lines += [
        "" if lines else None,  # type: ignore[list-item]
        f"{counts['files']} files, {counts['changed']} changed, "
        f"{counts['held']} left as they are, {counts['needs_person']} places need a person",
    ]
    return "\n".join(line for line in lines if line is not None)


def _state(result: FileResult) -> str:
    if result.written:
        return "rewritten"
    if result.changed:
        return "would change"
    return "left as it is" if result.held else ""
