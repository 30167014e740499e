"""What quantization costs on trained networks, beside the tools that others use, on tasks with data.

    make bench-accuracy BENCH="--models faces pitch --peers torch_ao backquant"
    python -m benchmarks.tasks --recordings /usr/share/klettres --out out/tasks

The networks come inside of packages (``benchmarks/tasks/cases.py``), the recordings of speech with Debian's
``klettres-data``. Each cell is a process of its own with a time limit; what it
raises is said under the table.
Of each: the task on test data, SQNR of the output beside the float model in dB, and CPU time of a test batch
as × of the float model in PyTorch, which runs in turns with it in the same process, one thread. The x86 rows
run on the library of kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import machine
from benchmarks.peers import Prepared, Task
from benchmarks.tasks.cases import CASES, Case

#: Of what searches by a metric: 0.3 points.
BUDGET = {"max_drop": 0.003}
#: By name: the module of ``benchmarks.peers``, its function, further arguments, and the row's title.
PEERS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "float": ("eager", "prepare", {}, "float"),
    "openvino": ("openvino", "prepare_float", {}, "OpenVINO, float"),
    "torch_ao": ("torch_ao", "prepare", {}, "torch.ao FX, x86"),
    "ort_minmax": ("onnx_runtime", "prepare_int8", {}, "ONNX Runtime, min-max"),
    "ort_percentile": ("onnx_runtime", "prepare_percentile", {}, "ONNX Runtime, percentile"),
    "nncf": ("openvino", "prepare_int8", {}, "NNCF, OpenVINO"),
    "nncf_control": ("openvino", "prepare_controlled", BUDGET, "NNCF, accuracy control"),
    "backquant": ("ours", "prepare_library", {}, "backquant x86"),
    "better": ("ours", "prepare_library", {"recipe": "better"}, "backquant x86, better"),
    "best": ("ours", "prepare_library", {"recipe": "best"}, "backquant x86, best"),
    "search": ("ours", "prepare_searched", BUDGET, "backquant x86, search"),
    "search_better": (
        "ours",
        "prepare_searched",
        {**BUDGET, "recipe": "better"},
        "backquant x86, better, search",
    ),
    "onnxruntime": ("deployed", "prepare_onnxruntime", {}, "backquant ONNX Runtime"),
    "openvino_ours": ("deployed", "prepare_openvino", {}, "backquant OpenVINO"),
    "openvino_better": (
        "deployed",
        "prepare_openvino",
        {"recipe": "better"},
        "backquant OpenVINO, better",
    ),
    "openvino_search": (
        "deployed",
        "prepare_searched_openvino",
        BUDGET,
        "backquant OpenVINO, search",
    ),
    "openvino_search_better": (
        "deployed",
        "prepare_searched_openvino",
        {**BUDGET, "recipe": "better"},
        "backquant OpenVINO, better, search",
    ),
}
RECORDINGS = Path("/usr/share/klettres")
TURNS = 15


def sqnr(wanted: torch.Tensor, found: torch.Tensor) -> float:
    noise = (wanted.double() - found.double()).square().sum()
    return float(10 * torch.log10(wanted.double().square().sum() / noise.clamp(min=1e-30)))


def _cpu_time(call: Callable[[], Any]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def _speed(made: Prepared, case: Case) -> float:
    """How many times as fast as the float model: the median of turns."""
    fed, ratios = made.feed(case.tests[0]), []
    count = max(1, int(0.05 / max(_cpu_time(lambda: case.model(*case.tests[0])), 1e-6)))
    for _ in range(TURNS):
        pairs = (
            min(_cpu_time(call) for _ in range(count))
            for call in (lambda: case.model(*case.tests[0]), lambda: made.run(fed))
        )
        in_float, own = pairs
        ratios.append(in_float / own)
    return statistics.median(ratios)


def cell(model: str, peer: str, recordings: Path, workspace: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    case = CASES[model](recordings)
    module, function, more, _ = PEERS[peer]
    prepare = partial(getattr(import_module(f"benchmarks.peers.{module}"), function), **more)
    task = Task(
        model,
        case.model,
        case.calibration,
        threads=1,
        workspace=workspace,
        transformer=case.transformer,
        held=case.held,
        judge=case.judge,
    )
    with torch.no_grad():
        wanted = [case.model(*batch) for batch in case.tests]
        start = time.process_time()
        made = prepare(task)
        seconds = time.process_time() - start
        read = (made.read(made.run(made.feed(batch))) for batch in case.tests)
        found = [torch.from_numpy(np.array(values)) for values in read]
        return {
            "metric": case.metric(found),
            "sqnr": sqnr(torch.cat(wanted), torch.cat(found)),
            "speed": _speed(made, case),
            "seconds": seconds,
        }


def measured(options: argparse.Namespace, model: str, peer: str) -> dict[str, Any]:
    """A cell, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.tasks", "--cell", model, peer]
    command += ["--recordings", str(options.recordings)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=False,
            text=True,
            timeout=options.limit,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {options.limit} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"failed": f"the process ended with status {done.returncode}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def row(model: str, peer: str, found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"| {model} | {PEERS[peer][3]} | – | – | – | – |"
    level = "" if peer == "float" else f"{found['sqnr']:.1f}"
    return (
        f"| {model} | {PEERS[peer][3]} | {found['metric']:.3f} | {level} "
        f"| {found['speed']:.2f} | {found['seconds']:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--recordings", type=Path, default=RECORDINGS)
    parser.add_argument("--limit", type=float, default=1800, help="seconds for a cell")
    parser.add_argument("--out", type=Path, default=Path("out/tasks"))
    parser.add_argument("--cell", nargs=2, metavar=("MODEL", "PEER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        with tempfile.TemporaryDirectory() as folder:
            try:
                answer = cell(*options.cell, options.recordings, Path(folder))
            except Exception as error:  # a row of the list under the table
                traceback.print_exc()
                answer = {"failed": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
        print(json.dumps(answer), flush=True)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    cells, failed = [], []
    print("| task | tool | right | SQNR, dB | × float | CPU s |\n|---|---|---|---|---|---|")
    for model in options.models:
        for peer in options.peers:
            found = measured(options, model, peer)
            cells.append({"model": model, "peer": peer, **found})
            print(row(model, peer, found), flush=True)
            if "failed" in found:
                failed.append(f"{model}, {PEERS[peer][3]}: {found['failed']}")
    print("", *failed, sep="\n")
    data = {"machine": machine(), "cells": cells}
    (options.out / "tasks.json").write_text(json.dumps(data, indent=1, default=str))


if __name__ == "__main__":
    main()
