"""Calibration, per batch, beside the float forward: ours and torch.ao's, in one run, one thread.

Default mapping of x86 (histogram observers), batch 1. The three take turns of a few batches, so that
what else the machine does meets all of them; CPU time; ratios are medians of ratios within a round.
Ours is ``backquant.calibrate`` with its checks of the inputs. ``--quality`` feeds every tensor that a
histogram of ours sees to PyTorch's HistogramObserver, too, and compares the squared errors of
quantizing these tensors with the qparams of either. Writes ``calibration.json``, ``.md``, ``.png``.

    python -m benchmarks.calibration --models resnet50 mobilenet_v2 --out out/bench
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch import nn

import backquant
from backquant.calibrate import calibrate, site_observers
from benchmarks.machine import machine
from benchmarks.models import MODELS, build
from benchmarks.plot import Bars, draw_bars
from benchmarks.results import geometric_mean

Batches = list[torch.Tensor]
TITLES = {"ours": "backquant", "torch_ao": "torch.ao FX"}


@dataclass(frozen=True)
class Quality:
    """Squared error with our qparams over that with PyTorch's, of one tensor; and of all tensors."""

    worst: float
    mean: float
    observers: int


def prepared_by_us(model: nn.Module, example: torch.Tensor) -> Any:
    mapping = backquant.get_default_qconfig_mapping("x86")
    config = backquant.get_backend_config("x86")
    return backquant.prepare_fx(model, mapping, (example,), backend_config=config)


def prepared_by_torch(model: nn.Module, example: torch.Tensor) -> Any:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_fx

    return prepare_fx(model, get_default_qconfig_mapping("x86"), (example,))


def runners(
    model: nn.Module, batches: Batches
) -> tuple[dict[str, Callable[[Batches], None]], dict[str, str]]:
    """What runs some batches, by name; and why a name has none."""

    def forward(module: nn.Module) -> Callable[[Batches], None]:
        def run(some: Batches) -> None:
            for batch in some:
                module(batch)

        return run

    prepared = prepared_by_us(model, batches[0])
    found = {"fp32": forward(model), "ours": lambda some: void(calibrate(prepared, some))}
    try:
        theirs = forward(prepared_by_torch(model, batches[0]))
        theirs(batches[:1])
        found["torch_ao"] = theirs
    except Exception as error:  # its row's reason
        return found, {"torch_ao": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    return found, {}


def void(_: object) -> None:
    """The value of a statement."""


def timed(run: Callable[[Batches], None], batches: Batches) -> float:
    start = time.process_time()
    run(batches)
    return (time.process_time() - start) / len(batches)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    model = build(name)
    torch.manual_seed(1)
    batches = [MODELS[name].sample(1) for _ in range(options.batches)]
    run, failed = runners(model, batches)
    times: dict[str, list[float]] = {peer: [] for peer in run}
    for peer in run:
        run[peer](batches[:2])  # warm up
    for _ in range(options.rounds):
        for peer, seconds in times.items():
            seconds.append(timed(run[peer], batches) * 1e3)
    ratios = {
        peer: [own / base for own, base in zip(times[peer], times["fp32"], strict=True)]
        for peer in times
        if peer != "fp32"
    }
    row: dict[str, Any] = {
        "model": name,
        "ms": {peer: median(each) for peer, each in times.items()},
        "ratio": {peer: median(each) for peer, each in ratios.items()},
        "spread": {peer: spread(each) for peer, each in ratios.items()},
        "rounds_ms": times,
        "failed": failed,
    }
    if options.quality:
        found = quality(model, batches)
        row["quality"] = vars(found)
    return row


def spread(ratios: Sequence[float]) -> float:
    """Half the distance of the quartiles."""
    low, _, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return (high - low) / 2


def quality(model: nn.Module, batches: Batches) -> Quality:
    from torch.ao.quantization import HistogramObserver as Oracle

    prepared = prepared_by_us(model, batches[0])
    pairs = {
        observer: Oracle(
            bins=observer.bins,
            dtype=observer.dtype,
            qscheme=observer.qscheme,
            quant_min=observer.quant_min,
            quant_max=observer.quant_max,
        )
        for observer in site_observers(prepared).values()
        if isinstance(observer, backquant.HistogramObserver)
    }

    def tell(observer: Any, args: Any, _: Any) -> None:
        if args[0].is_floating_point():  # PyTorch's cannot measure integers
            pairs[observer](args[0])

    hooks = [observer.register_forward_hook(tell) for observer in pairs]
    calibrate(prepared, batches)
    for hook in hooks:
        hook.remove()
    chosen = {
        observer: [_qparams(observer, observer), _qparams(theirs, observer)]
        for observer, theirs in pairs.items()
        if theirs.min_val <= theirs.max_val
    }
    errors = {observer: [0.0, 0.0] for observer in chosen}

    def add(observer: Any, args: Any, _: Any) -> None:
        for index, qparams in enumerate(chosen[observer]):
            rounded = torch.fake_quantize_per_tensor_affine(args[0], *qparams)
            errors[observer][index] += float((args[0] - rounded).double().square().sum())

    for observer in chosen:
        observer.register_forward_hook(add)
    for batch in batches:
        prepared(batch)
    quotients = [ours / theirs if theirs else 1.0 for ours, theirs in errors.values()]
    return Quality(max(quotients), geometric_mean(quotients), len(quotients))


def _qparams(observer: Any, like: Any) -> tuple[float, int, int, int]:
    scale, zero_point = observer.calculate_qparams()
    return float(scale), int(zero_point), like.quant_min, like.quant_max


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| model | fp32 ms | backquant × fp32 | torch.ao × fp32 | squared error / PyTorch's: "
        "mean, worst |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            f"{row['ratio'][peer]:.2f} ± {row['spread'][peer]:.2f}"
            if peer in row["ratio"]
            else "failed"
            for peer in TITLES
        ]
        found = row.get("quality")
        cells.append("–" if found is None else f"{found['mean']:.3f}, {found['worst']:.3f}")
        lines.append(f"| {row['model']} | {row['ms']['fp32']:.1f} | " + " | ".join(cells) + " |")
    means = []
    for peer in TITLES:
        values = [row["ratio"][peer] for row in rows if peer in row["ratio"]]
        means.append(f"{geometric_mean(values):.2f}" if values else "–")
    lines.append("| geometric mean | | " + " | ".join(means) + " | |")
    failed = [
        f"- {row['model']}, {TITLES[peer]}: {why}"
        for row in rows
        for peer, why in row["failed"].items()
    ]
    lines += ["", *failed] if failed else []
    return "\n".join(lines)


def write(rows: Sequence[dict[str, Any]], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    data = {"machine": machine(), "rows": list(rows)}
    (out / "calibration.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    (out / "calibration.md").write_text(table(rows) + "\n", encoding="utf-8")
    bars = Bars(
        [row["model"] for row in rows],
        {TITLES[peer]: [row["ratio"].get(peer) for row in rows] for peer in TITLES},
        "one batch of calibration / float forward",
    )
    draw_bars(bars, out / "calibration.png")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=4, help="batches of one per turn")
    parser.add_argument("--quality", action="store_true", help="compare the qparams, too")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for name in options.models:
        print(f"calibration: {name} …", file=sys.stderr, flush=True)
        with torch.no_grad():
            rows.append(measure(name, options))
        write(rows, options.out)
    print(table(rows))


if __name__ == "__main__":
    main()
