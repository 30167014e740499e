"""The command ``conform``: whether an engine does what a description says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from backquant.cli.console import DONE, NO, emit, guarded, stop


def conform(
    backend: Annotated[str, typer.Argument(help="A backend's name, or a YAML or JSON file.")],
    entries: Annotated[
        list[str] | None,
        typer.Option("--entries", "-e", help="Only entries whose pattern contains this text."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option("--engine", help="An engine, or mypkg:NAME; default: the description's."),
    ] = None,
    minutes: Annotated[
        float, typer.Option("--minutes", help="No case begins after that time.")
    ] = 10.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of all random draws.")] = 0,
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="Uses of the operator for each claim.")
    ] = 3,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=0, help="Processes; default: one a core.")
    ] = None,
    limit: Annotated[float, typer.Option("--limit", help="Seconds that one case may take.")] = 60.0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A folder for outcomes, pages and reproducers."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the folder of --output.")
    ] = False,
    examples: Annotated[
        str | None,
        typer.Option("--examples", help="mypkg:NAME, a mapping from operators to examples."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", help="Package that a file may refer to."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of text.")] = False,
) -> None:
    """Test whether an engine does what a description says. Exit 1 if a case fails."""
    from backquant.calibrate.feed import ProgressBar
    from backquant.cli.backends import load_backend
    from backquant.conformance import conform as tried
    from backquant.conformance.engines import imported

    with guarded(as_json=as_json), ProgressBar("conform", quiet=as_json) as progress:
        found = tried(
            load_backend(backend, allow),
            engine=engine,
            entries=entries or (),
            minutes=minutes,
            seed=seed,
            rounds=rounds,
            jobs=jobs,
            limit=limit,
            output=output,
            resume=resume,
            examples=imported(examples, "examples") if examples else None,
            progress=progress,
        )
    emit(found.document(), as_json=as_json, data=found.to_dict())
    stop(DONE if found.conforms else NO)
