"""The command ``quantize-parts``: models whose own ``forward`` no capture takes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from backquant.cli.console import DONE, NO, console, emit, guarded, note, stop
from backquant.cli.model_commands import DATA, Allow, BatchSize, Json, Model, Recipe, Slower
from backquant.errors import UsageError


def quantize_parts(
    model: Model,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The folder to write; it must not be there yet.")
    ],
    data: Annotated[
        str,
        typer.Option("--data", "-d", help=DATA),
    ],
    backend: Annotated[str, typer.Option("--backend", "-b", help="Name or file.")] = "x86",
    part: Annotated[
        list[str] | None,
        typer.Option("--part", help="Path of a submodule; once for each. Default: they are found."),
    ] = None,
    batch_size: BatchSize = 32,
    require: Annotated[
        float | None, typer.Option("--require", help="Least share of multiply-adds on integers.")
    ] = None,
    slower: Slower = None,
    recipe: Recipe = "default",
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Quantize the parts of a model whose forward cannot be captured (detectors). Writes a folder."""
    import backquant
    from backquant.cli.data import load_data
    from backquant.cli.models import load_model, sound_backend
    from backquant.files import is_folder

    with guarded(as_json=as_json):
        if os.path.lexists(output) or not is_folder(output.parent):
            raise UsageError(
                f"{output} exists"
                if os.path.lexists(output)
                else f"there is no folder {output.parent}",
                where="--output",
                fix=f"--output {output.name}-2   # a folder that is not there yet, in one that is",
            )
        config = sound_backend(backend, allow)
        module, example = load_model(model)
        made = backquant.quantize_parts(
            module,
            example,
            parts=part,
            backend=config,
            calibration=load_data(data, module, batch_size),
            require=require,
            slower=slower,
            recipe=recipe,
            progress=not as_json,
        )
        backquant.save_parts(made, output, allow=tuple(allow or ()))
    emit(
        f"wrote {output}\n\n{made}",
        as_json=as_json,
        data={"folder": str(output), **made.to_dict()},
    )


# The command ``migrate``: from ``torch.ao.quantization`` to backquant, file by file.


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
