"""Whether quantizing pays: quantized models beside their float models, and what was left in float for it.

    python -m benchmarks.pays --models m5 dlrm --out out/pays

For each model three that take turns in one process, on one thread: float as it comes (eager), all that
can be quantized (``slower="keep"``), and what ``quantize`` chooses (``slower="float"``). The clock is the
CPU time of the thread, so that other work on the machine does not count; each turn's fastest run counts.
Writes ``pays.json`` and ``pays.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import backquant
from benchmarks.machine import machine
from benchmarks.pays_models import CASES

CALIBRATION = 2


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def turns(
    models: dict[str, nn.Module], inputs: Any, rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Milliseconds of each model in each round."""
    counts = {}
    for name, model in models.items():
        start, runs = time.perf_counter(), 0
        while runs < 3 or time.perf_counter() - start < seconds:
            call(model, inputs)
            runs += 1
        counts[name] = max(2, runs)
    found: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            found[name].append(1e3 * min(_timed(model, inputs) for _ in range(counts[name])))
    return found


def _timed(model: nn.Module, inputs: Any) -> float:
    start = time.thread_time()
    call(model, inputs)
    return time.thread_time() - start


def measure(name: str, backend: str, rounds: int, seconds: float) -> dict[str, Any]:
    """The row of one model."""
    torch.manual_seed(0)
    case = CASES[name]()
    model = case.model.eval()
    example = case.sample()
    calibration = [case.sample() for _ in range(CALIBRATION)]
    models, row = {"float": model}, {"model": name}
    for choice in ("keep", "float"):
        start = time.thread_time()
        made = _quantized(model, example, calibration, backend, choice)
        row[f"seconds {choice}"] = time.thread_time() - start
        row[f"share {choice}"] = made.report.coverage
        models[f"slower={choice}"] = made
    times = turns(models, example, rounds, seconds)
    for label, found in times.items():
        ratios = [one / other for one, other in zip(times["float"], found, strict=True)]
        row[label] = {"ms": median(found), "x": median(ratios)}
    row["left"] = _left(made)
    return row


def _quantized(
    model: nn.Module, example: Any, calibration: list[Any], backend: str, choice: str
) -> Any:
    asked: Callable[..., Any] = backquant.quantize
    return asked(model, example, backend=backend, calibration=calibration, slower=choice)


def _left(model: Any) -> int:
    decisions = model.plan.decisions.values()
    return sum(any(r.rule == "slower-than-float" for r in d.reasons) for d in decisions)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | float ms | all × (share) | chosen × (share) | left in float | quantize s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['model']} | {row['failed']} | | | | |")
            continue
        cells = [row["model"], f"{row['float']['ms']:.3f}"]
        for choice in ("keep", "float"):
            share = row[f"share {choice}"]
            cells.append(f"{row[f'slower={choice}']['x']:.2f} ({share:.0%})")
        cells += [str(row["left"]), f"{row['seconds keep']:.1f} → {row['seconds float']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--backend", default="x86")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.2, help="length of a turn")
    parser.add_argument("--core", type=int, help="which core to pin to (default: none)")
    parser.add_argument("--out", type=Path, default=Path("out/pays"))
    options = parser.parse_args()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in options.models:
        try:
            with torch.no_grad():
                rows.append(measure(name, options.backend, options.rounds, options.seconds))
        except Exception as error:  # whatever a model raises is its row's reason
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
            rows.append({"model": name, "failed": reason})
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
        data = {"machine": machine(), "backend": options.backend, "rows": rows}
        (options.out / "pays.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
        (options.out / "pays.md").write_text(table(rows) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
