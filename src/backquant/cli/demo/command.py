"""The ``demo`` command: data in, trained float model, int8 model, numbers, report, artifact."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from backquant.cli.console import guarded

if TYPE_CHECKING:
    from backquant.cli.demo.digits import Digits, DigitsNet
    from backquant.cli.demo.measure import Latency

__all__ = ["demo"]

EPOCHS = 8
CALIBRATION_BATCH = 64


def demo(
    backend: Annotated[str, typer.Option("--backend", "-b", help="Name or file.")] = "x86",
    out: Annotated[Path, typer.Option("--out", help="Folder for the report and the model.")] = Path(
        "out/demo"
    ),
) -> None:
    """Train a residual CNN on handwritten digits, quantize it, and show what happened."""
    import torch

    import backquant
    from backquant.cli.demo.digits import accuracy, load_digits
    from backquant.cli.demo.measure import compare_latency

    console = Console(highlight=False)
    with guarded():
        backquant.get_backend_config(backend)  # an unknown name is refused before training
        data = load_digits()
        console.print(
            f"[bold]1[/] train a residual CNN on {len(data.train_labels)} handwritten digits"
        )
        model = _train(data, console)
        console.print(f"[bold]2[/] quantize it for {backend}, calibrated on the training images")
        quantized = backquant.quantize(
            model,
            (data.test_images[:1],),
            backend=backend,
            calibration=list(data.train_images.split(CALIBRATION_BATCH)),
            progress=True,
        )
        console.print("[bold]3[/] compare them")
        scores = tuple(accuracy(m, data.test_images, data.test_labels) for m in (model, quantized))
        latencies = [compare_latency(model, quantized, data.test_images[:n]) for n in (1, 64)]
        out.mkdir(parents=True, exist_ok=True)
        report = dataclasses.replace(quantized.report, extras=_extras(scores, latencies))
        report.save_html(str(out / "report.html"))
        backquant.save(quantized, out / "digits.bq")
        loaded = backquant.load(out / "digits.bq")
        same = torch.equal(loaded(data.test_images[:64]), quantized(data.test_images[:64]))
    console.print(_numbers(report, scores, latencies))
    _print_outcome(console, report)
    console.print(
        f"\nreport   {out / 'report.html'}\nmodel    {out / 'digits.bq'}", highlight=False
    )
    console.print(
        f"         loaded again without its code: outputs {'equal' if same else 'DIFFER'}"
    )


def _train(data: Digits, console: Console) -> DigitsNet:
    import torch

    from backquant.cli.demo.digits import DigitsNet, train

    torch.manual_seed(0)
    model = DigitsNet()
    columns = (TextColumn("  epochs"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("train", total=EPOCHS)
        train(model, data, EPOCHS, lambda epoch: progress.update(task, completed=epoch))
    return model


def _extras(scores: tuple[float, ...], latencies: list[Latency]) -> dict[str, Any]:
    """What the report shows beside the operators."""
    cards = [{"title": "accuracy", "value": f"{scores[1]:.1%}", "remark": f"float {scores[0]:.1%}"}]
    cards += [
        {
            "title": f"faster at batch {latency.batch}",
            "value": f"{latency.ratio:.1f}×",
            "remark": f"{latency.float_ms:.2f} → {latency.quantized_ms:.2f} ms, one thread",
        }
        for latency in latencies
    ]
    return {"cards": cards}


def _numbers(report: Any, scores: tuple[float, ...], latencies: list[Latency]) -> Table:
    from backquant.report.text import human_bytes

    table = Table("", "float", "int8", "", show_edge=False)
    points = 100 * (scores[1] - scores[0])
    table.add_row("accuracy", f"{scores[0]:.2%}", f"{scores[1]:.2%}", f"{points:+.2f} points")
    ratio = report.float_bytes / max(report.quantized_bytes, 1)
    sizes = (human_bytes(report.float_bytes), human_bytes(report.quantized_bytes))
    table.add_row("size", *sizes, f"{ratio:.1f}× smaller")
    for latency in latencies:
        table.add_row(
            f"latency, batch {latency.batch}",
            f"{latency.float_ms:.2f} ms",
            f"{latency.quantized_ms:.2f} ms",
            f"{latency.ratio:.1f}× faster" if latency.ratio >= 1 else f"{latency.ratio:.2f}×",
        )
    return table


def _print_outcome(console: Console, report: Any) -> None:
    from backquant.report.text import renderable

    console.print()
    console.print(renderable(report))
    if not report.float_rows:
        console.print(Text("no operator stays float", style="green"))
