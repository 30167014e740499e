"""The ``demo`` command: data in, trained float model, quantized model, numbers, report, artifact."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from backquant.cli.console import DONE, NO, console, emit, guarded, note, stop

if TYPE_CHECKING:
    from backquant.backend_config import BackendConfig
    from backquant.cli.demo.outcome import Digits, DigitsNet, Outcome
    from backquant.pages import Table
    from backquant.report.model import Report


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
    from backquant.cli.demo.outcome import load_digits, measured
    from backquant.cli.models import load_backend

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
    emit(*_shown(outcome, report, files), as_json=as_json, data=data_out)
    stop(DONE if outcome.same_when_loaded else NO)


def _check_before_training(config: BackendConfig, data: Digits) -> None:
    """Refuse what would be refused after it: an engine that is not here, a backend without a match."""
    import backquant
    from backquant.cli.demo.outcome import DigitsNet
    from backquant.lower import engine_info
    from backquant.report.model import check_requirement

    if config.engine is not None:
        engine_info(config.engine)
    check_requirement(backquant.explain(DigitsNet(), data.test_images[:1], backend=config), None)


def _train(data: Digits) -> DigitsNet:
    import torch
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from backquant.cli.demo.outcome import DigitsNet, train

    torch.manual_seed(0)
    model = DigitsNet()
    columns = (TextColumn("training"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    target = console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=target) as progress:
        task = progress.add_task("train", total=EPOCHS)
        train(model, data, EPOCHS, lambda epoch: progress.update(task, completed=epoch))
    return model


def _shown(outcome: Outcome, report: Report, files: dict[str, str]) -> Iterator[object]:
    again = "the same outputs" if outcome.same_when_loaded else "OTHER OUTPUTS"
    yield from (_numbers(outcome, report), "", report.document(), "")
    if not report.float_rows:
        yield "no operator stays float"
    if not outcome.latencies:
        yield f"{report.backend} is for export only: running it here simulates int8, so no latency"
    yield f"report   {files['report']}"
    yield f"model    {files['artifact']}   loaded again: {again}"


def _numbers(outcome: Outcome, report: Report) -> Table:
    from backquant.pages import Table
    from backquant.report.document import human_bytes

    before, after = outcome.accuracies
    ratio = report.float_bytes / max(report.quantized_bytes, 1)
    rows = [
        (
            "accuracy",
            f"{before:.2%}",
            f"{after:.2%}",
            f"{100 * (after - before):+.2f} points",
        ),
        (
            "size",
            human_bytes(report.float_bytes),
            human_bytes(report.quantized_bytes),
            f"{ratio:.1f}× smaller",
        ),
    ]
    for latency in outcome.latencies:
        verdict = "faster" if latency.ratio >= 1 else "as fast"
        rows.append(
            (
                f"latency, batch {latency.batch}",
                f"{latency.float_ms:.2f} ms",
                f"{latency.quantized_ms:.2f} ms",
                f"{latency.ratio:.2f}× {verdict}, one thread",
            )
        )
    return Table.of(", float, quantized, ", rows)
