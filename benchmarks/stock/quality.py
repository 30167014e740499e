"""SQNR of stock models beside the peers: which of them a default of ours serves worse than others do.

    python -m benchmarks.stock.quality --family encoder "time series" --out out/quality
    python -m benchmarks.stock.quality SegformerForSemanticSegmentation

Each model has a process of its own. Ours with ``slower="keep"``: quality of what is on integers, not of what
was given back. Calibration data are batches of the catalogue's samples, the tests others. Weights are random
where a package brings none: differences of single decibels are a matter of the draw.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import backquant
from benchmarks.machine import machine
from benchmarks.peers import Inputs, Prepared, Task
from benchmarks.peers import onnx_runtime as ort
from benchmarks.peers import openvino as ov
from benchmarks.stock.catalogue import build, catalogue
from benchmarks.stock.entry import Entry
from benchmarks.stock.roads import sqnr, tensors

BATCHES, TESTS = 8, 4
OURS = ("x86", "onnxruntime", "openvino")
#: With attention NNCF wants to be told.
_ATTENTION = (
    "attention in vision",
    "encoder",
    "decoder",
    "encoder-decoder",
    "speech",
    "time series",
)


class Positional(nn.Module):
    """``model`` on the tensors of its arguments; it gives the floating outputs as one row each sample."""

    def __init__(self, model: nn.Module, names: Sequence[str] | None) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        if self.names is None:
            found = self.model(*args)
        else:
            found = self.model(**dict(zip(self.names, args, strict=True)))
        rows = [t.reshape(1, -1) for t in tensors(found) if t.is_floating_point()]
        return torch.cat(rows, 1)


def _inputs(entry: Entry, count: int) -> list[Inputs]:
    found = []
    for _ in range(count):
        sample = entry.sample()
        values = sample.values() if isinstance(sample, dict) else sample
        one = (values,) if isinstance(values, torch.Tensor) else tuple(values)
        if not all(isinstance(value, torch.Tensor) for value in one):
            raise TypeError("takes more than tensors: peers are not asked")
        found.append(one)
    return found


def _ours(task: Task, backend: str) -> Prepared:
    batches = task.calibration
    made = backquant.quantize(
        task.model, batches[0], backend=backend, calibration=batches, slower="keep"
    )
    facts = {"share": made.report.coverage}
    if backend == "x86":
        return Prepared(lambda x: x, lambda x: made(*x), lambda y: y.numpy(), facts)
    suffix, load = {"onnxruntime": (".onnx", ort.session), "openvino": (".xml", _openvino)}[backend]
    path = task.workspace / f"{backend}{suffix}"
    backquant.export(made, path, require=0.0, overwrite=True)
    ran = load(path, task.threads)
    return Prepared(ran.feed, ran.run, ran.read, facts)


def _openvino(path: Path, threads: int) -> Prepared:
    import openvino

    return ov.compiled(openvino.Core().read_model(str(path)), threads)


PEERS: dict[str, Callable[[Task], Prepared]] = {
    **{name: lambda task, name=name: _ours(task, name) for name in OURS},  # type: ignore[misc]
    "ort_quantizer": ort.prepare_int8,
    "nncf": ov.prepare_int8,
}


def cell(name: str) -> dict[str, Any]:
    """By tool the decibels of one model."""
    entry = catalogue()[name]
    model, found = build(entry), {}
    torch.manual_seed(1)
    names = None
    if isinstance(sample := entry.sample(), dict):
        names = list(sample)
    wrapped = Positional(model, names).eval()
    calibration, tests = _inputs(entry, BATCHES), _inputs(entry, TESTS)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        wanted = [wrapped(*batch) for batch in tests]
        task = Task(
            name, wrapped, calibration, 1, Path(folder), transformer=entry.family in _ATTENTION
        )
        for peer, prepare in PEERS.items():
            try:
                made = prepare(task)
                got = [torch.tensor(made.read(made.run(made.feed(batch)))) for batch in tests]
                found[peer] = {"sqnr": sqnr(wanted, got), **made.facts}
            except Exception as error:  # a dash of the table, with its reason in the data
                traceback.print_exc()
                found[peer] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[:1]}"}
    return found


def measured(name: str, limit: float) -> dict[str, Any]:
    """``cell`` in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.stock.quality", "--cell", name]
    try:
        done = subprocess.run(command, capture_output=True, check=False, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {limit} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return {"failed": (done.stderr.splitlines() or [f"status {done.returncode}"])[-1]}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def row(name: str, found: dict[str, Any]) -> str:
    """A line of the table; the last column is what our worst lacks to the best peer."""
    levels = {peer: found.get(peer, {}).get("sqnr") for peer in PEERS}
    peers = [levels[peer] for peer in PEERS if peer not in OURS and levels[peer] is not None]
    ours = [levels[peer] for peer in OURS if levels[peer] is not None]
    behind = f"{max(peers) - min(ours):+.1f}" if peers and ours else "–"
    cells = ["–" if level is None else f"{level:.1f}" for level in levels.values()]
    return f"| {name} | {' | '.join(cells)} | {behind} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MODEL")
    parser.add_argument("--family", nargs="+", default=[])
    parser.add_argument("--limit", type=float, default=600, help="seconds for a model")
    parser.add_argument("--out", type=Path, default=Path("out/quality"))
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        print(json.dumps(cell(options.cell), default=str), flush=True)
        return
    entries = catalogue()
    if unknown := set(options.names) - set(entries):
        parser.error(
            f"no model of the catalogue: {', '.join(sorted(unknown))}; there are {', '.join(entries)}"
        )
    names = options.names or [
        name
        for name, entry in entries.items()
        if not options.family or entry.family in options.family
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"| model | {' | '.join(PEERS)} | behind |\n|---{'|---' * (len(PEERS) + 1)}|")
    rows = {}
    for name in names:
        rows[name] = measured(name, options.limit)
        print(row(name, rows[name]), flush=True)
        data = {"machine": machine(), "rows": rows}
        (options.out / "quality.json").write_text(json.dumps(data, indent=1, default=str))


if __name__ == "__main__":
    main()
