"""Commands about models: ``explain``, ``quantize``, ``inspect``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from backquant.cli.console import emit, guarded, note
from backquant.errors import UsageError

__all__ = ["explain", "inspect", "quantize"]

Model = Annotated[str, typer.Argument(help="module:factory; it returns model or (model, inputs).")]
Backend = Annotated[str, typer.Option("--backend", "-b", help="Name or file.")]
Inputs = Annotated[
    list[str] | None,
    typer.Option("--inputs", help="Shape and dtype of one argument, e.g. 1,3,224,224:float32."),
]
Json = Annotated[bool, typer.Option("--json", help="Print data instead of text.")]
Html = Annotated[Path | None, typer.Option("--html", help="Also write the report as a page.")]


def explain(
    model: Model,
    backend: Backend = "x86",
    inputs: Inputs = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Say for every operator what it would become on a backend, and why. Needs no data."""
    import backquant
    from backquant.cli.models import load_model, parse_inputs

    with guarded():
        module, example = load_model(model)
        example = parse_inputs(inputs) if inputs else example
        if example is None:
            raise UsageError(
                "example inputs are needed",
                where=f"MODEL {model!r}",
                fix="return (model, example_inputs) from the factory, or pass --inputs "
                "1,3,224,224:float32",
            )
        report = backquant.explain(module.eval(), example, backend=backend)
        if html:
            report.save_html(str(html))
    emit(as_json=as_json, data=report.to_dict(), shown=_renderable(report))


def quantize(  # size: one parameter per option of the command
    model: Model,
    data: Annotated[str, typer.Option("--data", "-d", help="File, folder, or module:iterable.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the artifact.")],
    backend: Backend = "x86",
    inputs: Inputs = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1)] = 32,
    require: Annotated[
        list[str] | None,
        typer.Option(
            "--require", help="Share of multiply-adds (0.9), or a module that must be int8."
        ),
    ] = None,
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Quantize a model with calibration data and write one file that runs without its code."""
    import backquant
    from backquant.cli.data import load_data
    from backquant.cli.models import load_model, parse_inputs

    with guarded():
        module, example = load_model(model)
        batches = load_data(data, module, batch_size)
        example = parse_inputs(inputs) if inputs else example
        quantized = backquant.quantize(
            module.eval(),
            example,
            backend=backend,
            calibration=batches,
            require=_requirement(require),
            progress=not as_json,
        )
        backquant.save(quantized, output)
        if html:
            quantized.report.save_html(str(html))
    if quantized.engine is None:
        note(f"{backend} names no engine: {output} holds the reference model")
    emit(as_json=as_json, data=quantized.report.to_dict(), shown=_renderable(quantized.report))


def _requirement(texts: list[str] | None) -> float | tuple[str, ...] | None:
    """A share when one number is given, else module names."""
    if not texts:
        return None
    if len(texts) == 1:
        try:
            return float(texts[0])
        except ValueError:
            pass
    return tuple(texts)


def inspect(
    artifact: Annotated[Path, typer.Argument(help="A file that quantize wrote.")],
    html: Html = None,
    as_json: Json = False,
) -> None:
    """Print what an artifact holds: engine, kernels, what stays float; reads no tensor."""
    from backquant.artifact import describe

    with guarded():
        description = describe(artifact)
        if html:
            description.report.save_html(str(html))
    emit(as_json=as_json, data=description.to_dict(), shown=description.renderable())


def _renderable(report: Any) -> Any:
    from backquant.report.text import renderable

    return renderable(report)
