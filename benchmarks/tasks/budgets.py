"""Searches within budgets: whether they are kept, what the answer gains, how well its time was predicted.

    python -m benchmarks.tasks.budgets --models faces pitch --backends x86 openvino

Three budgets of the metric for each network and backend, one after the other with ``resume=``. *Kept*: the
metric of the answer, taken anew by whoever asked, drops by no more than the budget. *Cost*: seconds of the
search, of which calibrations there are that many; budgets after the first go on from its state.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch

import backquant
from benchmarks.machine import machine
from benchmarks.tasks.__main__ import RECORDINGS
from benchmarks.tasks.cases import CASES, Case

BACKENDS = ("x86", "onnxruntime", "openvino")
DROPS = (0.02, 0.005, 0.0)


def row(case: Case, backend: str, drop: float, state: Path) -> dict[str, Any]:
    asked: list[float] = []

    def metric(model: Any) -> float:
        asked.append(case.judge([model(*batch) for batch in case.held]))
        return asked[-1]

    found = backquant.search(
        case.model,
        case.held,
        backend,
        budget={"max_drop": drop},
        metric=metric,
        calibration=case.calibration,
        resume=state,
    )
    best = found.best
    in_float = case.judge([case.model(*batch) for batch in case.held])
    return {
        "drop": in_float - (best.metric if best.metric is not None else float("nan")),
        "met": found.met,
        "hindrance": found.hindrance,
        "in_float": sum(row.option == "float" for row in found.rows),
        "units": len(found.rows),
        "speed": best.float_ms / best.ms if best.ms and best.float_ms else None,
        "predicted": best.predicted_ms / best.ms if best.ms and best.predicted_ms else None,
        "trials": len(found.trials),
        "seconds": found.seconds,
    }


def cell(model: str, backend: str, recordings: Path) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    case = CASES[model](recordings)
    rows = []
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for drop in DROPS:
            try:
                found = row(case, backend, drop, Path(folder) / "state.json")
            except Exception as error:  # a row of the list under the table
                traceback.print_exc()
                found = {"failed": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
            rows.append({"model": model, "backend": backend, "max_drop": drop, **found})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def _line(found: dict[str, Any]) -> str:
    name = f"| {found['model']} | {found['backend']} | {found['max_drop']:g} "
    if "failed" in found:
        return f"{name}| – | – | – | – | – |"
    kept = "yes" if found["drop"] <= found["max_drop"] else "no" if found["met"] else "said: no"
    speed, predicted = found["speed"] or float("nan"), found["predicted"] or float("nan")
    cost = sum(found["seconds"].values()) / found["seconds"]["calibration"]
    return (
        f"{name}| {kept} ({found['drop']:.3f}) | {found['in_float']} of {found['units']} "
        f"| {speed:.2f} | {predicted:.2f} | {cost:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--recordings", type=Path, default=RECORDINGS)
    parser.add_argument("--limit", type=float, default=1800, help="seconds for three budgets")
    parser.add_argument("--out", type=Path, default=Path("out/tasks"))
    parser.add_argument("--cell", nargs=2, metavar=("MODEL", "BACKEND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        cell(*options.cell, options.recordings)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    print("| task | backend | max_drop | kept (drop) | in float | × float | predicted | cost |")
    print("|---|---|---|---|---|---|---|---|")
    for model in options.models:
        for backend in options.backends:
            for found in _cell_of_its_own(options, model, backend):
                rows.append(found)
                print(_line(found), flush=True)
    print(
        "",
        *(f"{r['model']}, {r['backend']}: {r['failed']}" for r in rows if "failed" in r),
        sep="\n",
    )
    data = {"machine": machine(), "rows": rows}
    (options.out / "budgets.json").write_text(json.dumps(data, indent=1, default=str))


def _cell_of_its_own(options: argparse.Namespace, model: str, backend: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.tasks.budgets"]
    command += ["--cell", model, backend, "--recordings", str(options.recordings)]
    ended = ""
    try:
        done = subprocess.run(
            command, capture_output=True, check=False, text=True, timeout=options.limit
        )
        out, ended = done.stdout, f"the process ended with status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        out = (
            (error.stdout or b"").decode()
            if isinstance(error.stdout, bytes)
            else error.stdout or ""
        )
        ended = f"took longer than {options.limit} s"
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in out.splitlines() if line.startswith("{")
    ]
    for drop in DROPS[len(rows) :]:
        rows.append({"model": model, "backend": backend, "max_drop": drop, "failed": ended})
    return rows


if __name__ == "__main__":
    main()
