"""Commands about accuracy: ``compare``, ``sensitivity``, ``search``; the last two take ranks, too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backquant.cli.console import DONE, NO, emit, guarded, only_answers, stop
from backquant.cli.model_commands import (
    DATA,
    Allow,
    Html,
    Inputs,
    Json,
    Model,
    Timeout,
    refuse_unused,
    save_page,
)
from backquant.errors import UsageError

if TYPE_CHECKING:
    from backquant.accuracy.comparison import Comparison
    from backquant.api.folders import CheckpointComparison

Data = Annotated[
    str,
    typer.Option("--data", "-d", help=DATA),
]
BatchSize = Annotated[
    int, typer.Option("--batch-size", min=1, help="Samples per batch, for files of arrays.")
]
Backend = Annotated[str, typer.Option("--backend", "-b", help="Name or file.")]
Calibration = Annotated[
    str | None,
    typer.Option(
        "--calibration", help="Data for measuring ranges, as --data; default: --data itself."
    ),
]
MetricName = Annotated[
    str | None,
    typer.Option("--metric", help="module:function that takes a model and returns a number."),
]
Resume = Annotated[
    Path | None,
    typer.Option("--resume", help="File that keeps measurements, to go on after an interruption."),
]


def compare(
    context: typer.Context,
    model: Model,
    artifact: Annotated[
        Path, typer.Argument(help="The file or folder that quantize or export wrote for MODEL.")
    ],
    data: Annotated[str | None, typer.Option("--data", "-d", help=DATA)] = None,
    metric: MetricName = None,
    batch_size: BatchSize = 32,
    html: Html = None,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Compare a quantized model with its float model, operator by operator; of language models two folders,
    without data, by their weights."""
    import backquant
    from backquant.api.arguments import is_language_model
    from backquant.cli.data import load_data
    from backquant.cli.models import import_object, load_model
    from backquant.deploy.target import is_exported

    found: Comparison | CheckpointComparison
    with guarded(as_json=as_json), only_answers():
        if is_language_model(model):
            unused = {"data", "metric", "batch_size", "allow"}
            refuse_unused(context, "language models in files", unused)
            found = backquant.compare(model, artifact)
        elif data is None:
            raise UsageError(
                "a comparison needs data", where=f"MODEL {model}", fix="--data batches.npz"
            )
        else:
            module, _ = load_model(model)
            is_ours = not (artifact.is_file() and is_exported(artifact))
            quantized = backquant.load(artifact, allow=tuple(allow or ())) if is_ours else artifact
            found = backquant.compare(
                module,
                quantized,
                load_data(data, module, batch_size),
                metric=None if metric is None else import_object(metric, "--metric"),
                progress=not as_json,
            )
        save_page(found, html)
    emit(found.document(), as_json=as_json, data=found.to_dict())


def sensitivity(
    model: Model,
    data: Data,
    backend: Backend = "x86",
    calibration: Calibration = None,
    inputs: Inputs = None,
    batch_size: BatchSize = 32,
    resume: Resume = None,
    timeout: Timeout = 600.0,
    html: Html = None,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Measure what each operator costs: quantized alone, and left in float alone."""
    import backquant
    from backquant.cli.data import load_data
    from backquant.cli.models import load_model, parse_inputs, sound_backend
    from backquant.cli.ranks import launched, of_rank, rank_in

    with guarded(as_json=as_json), launched(timeout) as group, only_answers():
        config = sound_backend(backend, allow)
        module, example = load_model(model)

        def batches(text: str) -> Iterable[Any]:
            return of_rank(load_data(text, module, batch_size), group)

        found = backquant.sensitivity(
            module,
            batches(data),
            config,
            example_inputs=parse_inputs(inputs) if inputs else example,
            calibration=None if calibration is None else batches(calibration),
            progress=not as_json and not rank_in(group),
            resume=resume,
            group=group,
        )
        if rank_in(group):
            return  # the first one says what all found
        save_page(found, html)
    emit(found.document(), as_json=as_json, data=found.to_dict())


def search(
    model: Model,
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="The artifact to write.")],
    budget: Annotated[
        list[str],
        typer.Option(
            "--budget",
            help="A limit: max_drop=0.01 (of the metric), min_sqnr=30 (dB), max_ms=5, max_ratio=0.5 (of the "
            "float model's time), max_bytes=1e6, max_bitops=1e9; may be repeated.",
        ),
    ],
    backend: Backend = "x86",
    metric: MetricName = None,
    lower_is_better: Annotated[
        bool, typer.Option("--lower-is-better", help="Smaller values of the metric are better.")
    ] = False,
    calibration: Calibration = None,
    recipe: Annotated[str, typer.Option("--recipe", help="As in quantize.")] = "default",
    inputs: Inputs = None,
    batch_size: BatchSize = 32,
    resume: Resume = None,
    timeout: Timeout = 600.0,
    html: Html = None,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Find the best quantized model within a budget of accuracy, time or size.

    Exit 1 if it is not kept, or if something stopped the search before its end: it is the best so far then.
    """
    import backquant
    from backquant.accuracy.search.runners import parsed
    from backquant.cli.data import load_data
    from backquant.cli.models import import_object, load_model, parse_inputs, sound_backend
    from backquant.cli.ranks import launched, of_rank, rank_in

    with guarded(as_json=as_json), launched(timeout) as group, only_answers():
        limits = parsed(budget)
        if limits.max_drop is not None and metric is None:
            raise UsageError(
                "max_drop needs a metric",
                where=f"--budget max_drop={limits.max_drop:g}",
                fix="--metric module:function, or --budget min_sqnr=30, which needs none",
            )
        config = sound_backend(backend, allow)
        module, example = load_model(model)

        def batches(text: str) -> Iterable[Any]:
            return of_rank(load_data(text, module, batch_size), group)

        found = backquant.search(
            module,
            batches(data),
            config,
            budget=limits,
            metric=None if metric is None else import_object(metric, "--metric"),
            lower_is_better=lower_is_better,
            example_inputs=parse_inputs(inputs) if inputs else example,
            calibration=None if calibration is None else batches(calibration),
            recipe=recipe,
            progress=not as_json and not rank_in(group),
            resume=resume,
            group=group,
        )
        if rank_in(group):
            return  # the first one says what all found
        backquant.save(found.model, output)
        save_page(found, html)
    emit(found.document(), as_json=as_json, data=found.to_dict())
    if not found.met or found.stopped:
        raise typer.Exit(1)


# The command ``conform``: whether an engine does what a description says of it.


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
    from backquant.cli.models import load_backend
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
