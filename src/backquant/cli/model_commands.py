"""Commands about models: ``explain``, ``quantize``, ``inspect``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from backquant.cli.console import DONE, NO, emit, guarded, note, stop
from backquant.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from backquant.api.checkpoints import CheckpointReport
    from backquant.backend_config import BackendConfig
    from backquant.calibrate.checkpoint import Checkpoint
    from backquant.deploy import Target
    from backquant.report.model import Report
    from backquant.runtime import QuantizedModel

__all__ = ["quantize_folder"]


class Page(Protocol):
    """What can be written as a page."""

    def to_html(self) -> str: ...


DATA = ".npz, .npy, .pt, .safetensors, a folder of .npy or .pt files, or module:iterable."
Model = Annotated[
    str,
    typer.Argument(
        help="module:factory, which returns model or (model, example_inputs), or a .pt2 file; or the folder "
        "of a language model (config.json, safetensors), for explain and compare also a GGUF file."
    ),
]
Backend = Annotated[str, typer.Option("--backend", "-b", help="Name or file.")]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--inputs", help="Shape and dtype of an argument, e.g. 1,3,224,224:float32; once for each."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print data instead of text.")]
Html = Annotated[
    Path | None, typer.Option("--html", help="Also write the report as a page (replaces a file).")
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        help="Package that the backend's file and the artifact may refer to.",
    ),
]
Table = Annotated[bool, typer.Option("--table", help="Also print all operators as a table.")]
BatchSize = Annotated[
    int, typer.Option("--batch-size", min=1, help="Samples per batch, for files of arrays.")
]
Slower = Annotated[
    str | None,
    typer.Option(
        "--slower",
        help="Operators that are slower on integers on this machine: float (default) or keep.",
    ),
]
Recipe = Annotated[
    str,
    typer.Option(
        "--recipe",
        help="Steps that reduce the loss of accuracy: default, none, better, best, or a file.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option("--timeout", min=1, help="Under torchrun: seconds that a rank may be silent."),
]


# What the ways to quantize have no use for: it is refused, not passed over.
_OF_MODELS = {"weight_bits", "to", "slower", "recipe", "checkpoint", "every", "resume"}
_OF_BACKENDS = {"backend", "engine", "inputs", "require", "files", "timeout", "html", "allow"}
_OF_FOLDERS = {"activations"}


def refuse_unused(context: typer.Context, way: str, unused: set[str]) -> None:
    """Raise ``UsageError`` for options on the command line that have no effect in this way."""
    for option in context.command.params:
        name = option.name or ""
        source = context.get_parameter_source(name)
        if name in unused and source is not None and source.name == "COMMANDLINE":
            flag = option.opts[0]
            raise UsageError(f"{flag} has no effect on {way}", where=flag, fix="leave it out")


def explain(
    context: typer.Context,
    model: Model,
    backend: Backend = "x86",
    inputs: Inputs = None,
    html: Html = None,
    allow: Allow = None,
    table: Table = False,
    as_json: Json = False,
) -> None:
    """Report what every operator would become on a backend, and why. Needs no data.

    Of a language model in files, exit status 1 if the format does not hold it whole.
    """
    import backquant
    from backquant.api.arguments import is_language_model
    from backquant.api.folders import explained_folder
    from backquant.cli.models import load_model, parse_inputs, sound_backend

    with guarded(as_json=as_json):
        config = sound_backend(backend, allow)
        if is_language_model(model):
            refuse_unused(context, "a language model in files", {"inputs", "table"})
            answer = explained_folder(model, config)
            save_page(answer, html)
            emit(answer.document(), as_json=as_json, data=answer.to_dict())
            stop(DONE if answer.is_taken else NO)
        module, example = load_model(model)
        example = parse_inputs(inputs) if inputs else example
        if example is None:
            raise UsageError(
                "example inputs are needed",
                where=f"MODEL {model}",
                fix="--inputs 1,3,224,224:float32   # or return (model, example_inputs) from the factory",
            )
        report = backquant.explain(module, example, backend=config)
        save_page(report, html)
    emit(*_shown(report, table=table), as_json=as_json, data=report.to_dict())


def quantize(
    context: typer.Context,
    model: Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the artifact.")],
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            "-d",
            help=f"{DATA} Not needed with --weights.",
        ),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", "-b", help="Name or file. Default: x86; with --weights x86_lowbit."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help="Engine instead of the backend's, e.g. integer_reference, which computes in integers only.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            "--weights",
            help="Quantize only weights, to int4, int8, …; needs no data. Layers by path: "
            "int8,embeddings=int4:64,head=float32.",
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            "--group-size", help="With --weights: how many weights of a row share a scale."
        ),
    ] = None,
    weight_bits: Annotated[
        int | None,
        typer.Option(
            "--weight-bits",
            help="7: int8 weights that no 16-bit sum overflows (CPUs without VNNI).",
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            "--activations",
            help="Of a FOLDER: int8 or float8_e4m3fn, by token at each call; int8:ahead measures one scale "
            "on --data.",
        ),
    ] = None,
    files: Annotated[
        Path | None,
        typer.Option(
            "--files",
            help="Weights in .safetensors files (or their folder), for a model larger than memory: "
            "MODEL is made without weights, and they are read a layer at a time.",
        ),
    ] = None,
    inputs: Inputs = None,
    batch_size: BatchSize = 32,
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require",
            help="Least share of multiply-adds on integers (0.9), or a module that must be.",
        ),
    ] = None,
    slower: Slower = None,
    recipe: Recipe = "default",
    to: Annotated[
        str | None,
        typer.Option("--to", help="Also export for a target, into a file named like OUTPUT."),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--checkpoint", help="Folder that keeps the progress of calibration until the end."
        ),
    ] = None,
    every: Annotated[
        int, typer.Option("--checkpoint-every", min=1, help="Batches between two checkpoints.")
    ] = 100,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the folder of --checkpoint.")
    ] = False,
    timeout: Timeout = 600.0,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Replace OUTPUT if it exists.")
    ] = False,
    html: Html = None,
    allow: Allow = None,
    as_json: Json = False,
) -> None:
    """Quantize a model and write one file that runs without its code."""
    import backquant
    from backquant.api.arguments import is_language_model
    from backquant.calibrate.feed import spinner
    from backquant.cli.data import load_data
    from backquant.cli.export_command import beside, checked_target
    from backquant.cli.mapped_weights import check_one_process, made_empty, written
    from backquant.cli.models import (
        load_model,
        parse_inputs,
        parse_requirement,
        parse_weights,
        sound_backend,
    )
    from backquant.cli.ranks import launched, of_rank, rank_in
    from backquant.deploy import find_target

    with guarded(as_json=as_json):
        if is_language_model(model):
            refuse_unused(context, "a folder", (_OF_MODELS | _OF_BACKENDS) - {"to", "recipe"})
            asked = parse_weights(weights)
            done = quantize_folder(
                Path(model), output, to, asked, group_size, data, recipe, batch_size,
                activations=activations, force=force, quiet=as_json,
            )  # fmt: skip
            emit(str(done), as_json=as_json, data=done.to_dict())
            return
    with guarded(as_json=as_json), launched(timeout) as group:
        refuse_unused(context, "a model: its backend says it", _OF_FOLDERS)
        if files is not None:
            refuse_unused(context, "--files", _OF_MODELS)
        if weights is not None:
            refuse_unused(context, "--weights, which name the bits", {"weight_bits"})
        _check_output(output, force)
        exported_to = checked_target(to, beside(output, to), force) if to else None
        required = parse_requirement(require)
        config = sound_backend(backend or ("x86_lowbit" if weights else "x86"), allow)
        if engine is not None:
            config.set_engine(engine)
        if data is None and weights is None:
            raise UsageError(
                "there is nothing to measure activations on",
                where="--data",
                fix="--data batches.npz   # or, for weights alone: --weights int4",
            )
        with made_empty(files):
            module, example = load_model(model)
        batches = None if data is None else of_rank(load_data(data, module, batch_size), group)
        given = parse_inputs(inputs) if inputs else example
        options: dict[str, Any] = {
            "backend": config,
            "calibration": batches,
            "require": required,
            "weights": parse_weights(weights),
            "group_size": group_size,
            "progress": not as_json and not rank_in(group),
        }
        allowed = tuple(allow or ())
        if files is not None:
            check_one_process(group)
            report = backquant.quantize_files(
                module, files, output, given, allow=allowed, **options
            )
            save_page(report, html)
            emit(
                *(f"wrote {output}", "", report.document()),
                as_json=as_json,
                data=written(output, report),
            )
            return
        if exported_to is not None:
            _check_operators(module, given, batches, config, find_target(to, exported_to))
        if weight_bits is not None:
            options["qconfig_mapping"] = backquant.default_mapping(config, weight_bits=weight_bits)
        quantized = backquant.quantize(
            module,
            given,
            slower=slower,
            group=group,
            checkpoint=_checkpoint(checkpoint, every, resume),
            recipe=recipe,
            **options,
        )
        if rank_in(group):
            return  # the first one writes
        backquant.save(quantized, output, allow=allowed)
        exported = None
        if exported_to is not None:
            with spinner(f"writing {exported_to}"):
                exported = backquant.export(quantized, exported_to, to=to, overwrite=force)
        save_page(quantized.report, html)
    if quantized.engine is None and exported is None:
        note(
            f"{config.name} is for export only: {output} holds the reference model, which simulates int8"
        )
    report = quantized.report
    data_out = written(output, report)
    shown = _summary(quantized, output)
    if exported is not None:
        data_out["exported"] = exported.to_dict()
        shown += ["", exported.render()]
    emit(*shown, as_json=as_json, data=data_out)


def _checkpoint(folder: Path | None, every: int, resume: bool) -> Checkpoint | None:
    from backquant.calibrate.checkpoint import Checkpoint

    if folder is None and resume:
        raise UsageError(
            "there is nothing to resume from", where="--resume", fix="--checkpoint FOLDER --resume"
        )
    return None if folder is None else Checkpoint(folder, every, resume)


def _check_operators(
    module: Any, given: Any, batches: Iterable[Any] | None, config: BackendConfig, target: Target
) -> None:
    """Refuse before calibration what the export would refuse after it."""
    from backquant.api.exporting import check_exportable

    if (
        given is None and batches is not None and iter(batches) is not batches
    ):  # else a look would cost the first batch
        given = next(iter(batches), None)
    if given is not None or config.engine is not None:
        check_exportable(module, given, config, target)


def _check_output(output: Path, force: bool) -> None:
    """Refuse before minutes of work what ``save`` would refuse after them."""
    from backquant.files import is_folder

    if is_folder(output) or not is_folder(output.parent):
        what = (
            f"{output} is a folder" if is_folder(output) else f"there is no folder {output.parent}"
        )
        fix = f"-o {output / 'model.bq'}" if is_folder(output) else f"mkdir -p {output.parent}"
        raise UsageError(what, where="--output", fix=fix)
    if os.path.lexists(output) and not force:
        raise UsageError(
            f"{output} exists",
            where="--output",
            fix="--force   # replaces it",
        )


def inspect(
    artifact: Annotated[Path, typer.Argument(help="A file that quantize wrote.")],
    html: Html = None,
    table: Table = False,
    as_json: Json = False,
) -> None:
    """Print what a saved model holds: engine, kernels, what stays float. Reads no tensor."""
    from backquant.artifact import describe

    with guarded(as_json=as_json):
        description = describe(artifact)
        save_page(description.report, html)
    shown = [description.render(), "", *_shown(description.report, table=table)]
    emit(*shown, as_json=as_json, data=description.to_dict())


def save_page(report: Page, html: Path | None) -> None:
    """Write what ``--html`` asks for. Raises ``UsageError`` where it cannot be written."""
    if html is None:
        return
    from backquant.files import is_folder, write_text

    if is_folder(html):
        raise UsageError(
            f"{html} is a folder", where="--html", fix=f"--html {html / 'report.html'}"
        )
    write_text(html, report.to_html(), "--html")


def _shown(report: Report, *, table: bool) -> list[object]:
    return [report.document(), *(["", report.operators_section()] if table else [])]


def _summary(quantized: QuantizedModel, output: Path) -> list[object]:
    from backquant.report.document import human_bytes

    size = human_bytes(output.stat().st_size)
    tensors = human_bytes(quantized.report.quantized_bytes)
    words = f"\nwritten: {output} ({size}: {tensors} of weights, and graph and report)"
    return [quantized.report.document(), words]


# ``quantize FOLDER``: a language model from its Hugging Face folder to a checkpoint that a server opens.


def quantize_folder(
    folder: Path,
    output: Path,
    to: str | None,
    weights: str | Mapping[str, str | None] | None,
    group_size: int | None,
    data: str | None,
    recipe: str,
    batch_size: int,
    *,
    activations: str | None = None,
    force: bool,
    quiet: bool,
) -> CheckpointReport:
    """Write the checkpoint. Raises as ``backquant.quantize_checkpoint``, and ``UsageError`` where the
    format or
    the weights are not named, and for a recipe without data."""
    import backquant
    from backquant.cli.data import load_data

    if to is None or weights is None:
        raise UsageError(
            "a folder needs a format and weights",
            where="quantize FOLDER",
            fix="--weights int4:128 --to compressed-tensors",
        )
    if data is None and recipe not in ("default", "none"):
        raise UsageError(
            f"the recipe {recipe!r} needs data",
            where="--recipe",
            fix="--data tokens.npz, with an array input_ids",
        )
    batches = None
    if data is not None:
        batches = load_data(data, _tokens(), batch_size)
    return backquant.quantize_checkpoint(
        folder,
        output,
        to=to,
        weights=weights,
        group_size=group_size,
        activations=activations,
        calibration=batches,
        recipe=recipe,
        overwrite=force,
        progress=not quiet,
    )


def _tokens() -> nn.Module:
    """What data are for: the arguments of every decoder."""
    from torch import Tensor, nn

    class Decoder(nn.Module):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            del attention_mask
            return input_ids

    return Decoder()
