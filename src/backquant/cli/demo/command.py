"""The ``demo`` command: data in, trained float model, quantized model, numbers, report, artifact."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from backquant.cli.console import DONE, NO, console, emit, guarded, note, stop

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from backquant.backend_config import BackendConfig
    from backquant.cli.demo.digits import Digits, DigitsNet
    from backquant.cli.demo.outcome import Outcome


EPOCHS = 8
CALIBRATION_BATCH = 64
BATCHES = (1, 64)  # at which latency is measured


def demo(
    backend: Annotated[str, typer.Option("--backend", "-b", help="Name or file.")] = "x86",
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for the report and the model (replaced).")
    ] = Path("out/demo"),
    allow: Annotated[
        list[str] | None, typer.Option("--allow", help="Package that the backend's file may name.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of text.")] = False,
) -> None:
    """Train a residual CNN on handwritten digits, quantize it, and show what happened."""
    import backquant
    from backquant.cli.backends import load_backend
    from backquant.cli.demo.digits import load_digits
    from backquant.cli.demo.outcome import measured

    with guarded(as_json=as_json):
        config = load_backend(backend, allow)
        data = load_digits()
        _check_before_training(config, data)
        note(f"1 train a residual CNN on {len(data.train_labels)} handwritten digits")
        model = _train(data)
        note(f"2 quantize it for {config.name}, calibrated on the training images")
        quantized = backquant.quantize(
            model,
            (data.test_images[:1],),
            backend=config,
            calibration=list(data.train_images.split(CALIBRATION_BATCH)),
            progress=True,
        )
        note("3 compare them, save the quantized model and load it again")
        out.mkdir(parents=True, exist_ok=True)
        backquant.save(quantized, out / "digits.bq", allow=tuple(allow or ()))
        loaded = backquant.load(out / "digits.bq", allow=tuple(allow or ()))
        outcome = measured(data, model, quantized, loaded, BATCHES)
        report = dataclasses.replace(quantized.report, extras={"cards": outcome.cards()})
        report.save_html(out / "report.html")
    files = {"report": str(out / "report.html"), "artifact": str(out / "digits.bq")}
    data_out = {**outcome.to_dict(), "files": files, "report": report.to_dict()}
    emit(as_json=as_json, data=data_out, shown=_shown(outcome, report, files))
    stop(DONE if outcome.same_when_loaded else NO)


def _check_before_training(config: BackendConfig, data: Digits) -> None:
    """Refuse what would be refused after it: an engine that is not here, a backend without a match."""
    import backquant
    from backquant.cli.demo.digits import DigitsNet
    from backquant.lower import engine_info
    from backquant.report.requirements import check_requirement

    if config.engine is not None:
        engine_info(config.engine)
    check_requirement(backquant.explain(DigitsNet(), data.test_images[:1], backend=config), None)


def _train(data: Digits) -> DigitsNet:
    import torch
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from backquant.cli.demo.digits import DigitsNet, train

    torch.manual_seed(0)
    model = DigitsNet()
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    target = console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=target) as progress:
        task = progress.add_task("train", total=EPOCHS)
        train(model, data, EPOCHS, lambda epoch: progress.update(task, completed=epoch))
    return model


def _shown(outcome: Outcome, report: Any, files: dict[str, str]) -> Group:
    from rich.console import Group
    from rich.text import Text

    from backquant.report.text import renderable

    again = "the same outputs" if outcome.same_when_loaded else "OTHER OUTPUTS"
    parts = [_numbers(outcome, report), Text(""), *renderable(report).renderables, Text("")]
    if not report.float_rows:
        parts.append(Text("no operator stays float", style="green"))
    if not outcome.latencies:
        parts.append(
            Text(
                f"{report.backend} is for export only: running it here simulates int8, so no latency"
            )
        )
    parts += [
        Text(f"report   {files['report']}"),
        Text(f"model    {files['artifact']}   loaded again: {again}"),
    ]
    return Group(*parts)


def _numbers(outcome: Outcome, report: Any) -> Table:
    from rich.table import Table

    from backquant.report.share import human_bytes

    table = Table("", "float", "quantized", "", show_edge=False)
    before, after = outcome.accuracies
    table.add_row(
        "accuracy", f"{before:.2%}", f"{after:.2%}", f"{100 * (after - before):+.2f} points"
    )
    ratio = report.float_bytes / max(report.quantized_bytes, 1)
    sizes = (human_bytes(report.float_bytes), human_bytes(report.quantized_bytes))
    table.add_row("size", *sizes, f"{ratio:.1f}× smaller")
    for latency in outcome.latencies:
        verdict = "faster" if latency.ratio >= 1 else "as fast"
        table.add_row(
            f"latency, batch {latency.batch}",
            f"{latency.float_ms:.2f} ms",
            f"{latency.quantized_ms:.2f} ms",
            f"{latency.ratio:.2f}× {verdict}, one thread",
        )
    return table
