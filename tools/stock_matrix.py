"""Every stock model down every road, and the table of it: ``docs/models.md``.

    python tools/stock_matrix.py --results out/stock.jsonl                     # all that is missing
    python tools/stock_matrix.py --results out/stock.jsonl --only resnet,Bert --roads kernels,onnxruntime
    python tools/stock_matrix.py --results out/stock.jsonl --families decoder,speech --roads saved
    python tools/stock_matrix.py --results out/stock.jsonl --tested --budget 3600
    python tools/stock_matrix.py --results out/stock.jsonl --render            # only write docs/models.md

A cell is a model of ``benchmarks/stock`` and a road of ``benchmarks/stock/roads.py``. The cells of a model
that are quantized alike share a process, which is ended, with all that it started, when a cell takes longer
than ``--limit``; the others go on in a new one. Each result is appended to the file of results (JSON lines)
as soon as it is there, and what the file holds is not run again, unless ``--again ok,failed,timeout,died``
names its outcome: a run can be stopped and gone on with at any time. The last result of a cell counts; cells
that the file does not hold stay as the page has them. ``--missing`` leaves out cells that the page has.
Exit status 1: a cell failed that ``tests/stock/known_failures.yaml`` does not list, or a listed one works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

import torch  # noqa: E402
import yaml  # noqa: E402
from benchmarks.stock.catalogue import catalogue  # noqa: E402
from benchmarks.stock.entry import FAMILIES, Entry  # noqa: E402
from benchmarks.stock.roads import ROADS, SETUPS, Outcome, Quantized, WrongNumbersError, quantized  # noqa: E402
from benchmarks.stock.settle import call  # noqa: E402
from stock_table import commits_of, rows_of, table  # noqa: E402

from backquant.errors import BackquantError  # noqa: E402
from stock_cells import CELLS  # noqa: E402

Row = dict[str, Any]
TURNS, TURN = 7, 0.1  # how often float and quantized take turns, and the CPU seconds of a turn
KNOWN = ROOT / "tests" / "stock" / "known_failures.yaml"
#: Imported once, before processes are forked: each costs seconds.
LIBRARIES = ("torchvision", "timm", "transformers", "segmentation_models_pytorch")
LIBRARIES += ("torch._dynamo", "torch.export", "torch._inductor.compile_fx", "onnxscript")
LIBRARIES += ("executorch.exir", "executorch.backends.xnnpack.partition.xnnpack_partitioner")


def run(entry: Entry, roads: Sequence[str], tell: Callable[[Row], None]) -> None:
    """``tell`` the result of each cell, in this process. The roads have one setup."""
    torch.set_num_threads(1)
    made: Quantized | None = None
    for road in roads:
        start = time.process_time()
        row: Row = {"model": entry.name, "road": road}
        try:
            made = made or quantized(entry, SETUPS[road])
            outcome: Outcome = ROADS[road](made)
            row |= {"outcome": "ok", "cpu": round(time.process_time() - start, 1)}
            row |= {"share": outcome.share, "sqnr": outcome.sqnr, "note": outcome.note}
            if outcome.run is not None:
                row["speed"] = faster(made, outcome)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            ours = isinstance(error, (BackquantError, WrongNumbersError))
            row |= {"outcome": "failed", "error": told[:2000], "raw": not ours}
            if not ours:
                row["trace"] = traceback.format_exc()[-4000:]
        tell(row)


def faster(made: Quantized, outcome: Outcome) -> float:
    """How many times as fast as the float model in PyTorch, in CPU time; the median of turns."""

    def turn(compute: Any) -> float:
        calls, start = 0, time.process_time()
        while time.process_time() < start + TURN:
            compute()
            calls += 1
        return (time.process_time() - start) / calls

    with torch.no_grad():
        ratios = []
        for _ in range(TURNS):
            one = turn(lambda: call(made.model, made.inputs))
            ratios.append(one / turn(outcome.run))
    return round(sorted(ratios)[TURNS // 2], 2)


def within(entry: Entry, roads: Sequence[str], limit: float) -> Iterator[Row]:
    """``run`` in a process of its own, and in another one for what was left when that ended."""
    left = list(roads)
    while left:
        for row in _one_process(entry, tuple(left), limit):
            left.remove(row["road"])
            yield row | {"commit": commit()}


def _one_process(entry: Entry, roads: Sequence[str], limit: float) -> Iterator[Row]:
    """Results up to the first cell that does not give one; that one's says why."""
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(entry, roads, sender))
    process.start()
    sender.close()
    try:
        for road in roads:
            if not receiver.poll(limit):
                error = {"outcome": "timeout", "error": f"more than {limit:.0f} s"}
                yield {"model": entry.name, "road": road} | error
                return
            try:
                row = receiver.recv()
            except EOFError:
                process.join()
                error = {"outcome": "died", "error": f"the process ended with {process.exitcode}"}
                yield {"model": entry.name, "road": road} | error
                return
            yield row
    finally:
        receiver.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # compilers that it started, too
        process.join()


def _child(entry: Entry, roads: Sequence[str], sender: Any) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)  # runtimes print
    os.dup2(sink, 2)
    run(entry, roads, sender.send)
    sender.close()


def commit() -> str:
    """Of the repository, as far as git tells."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def read(path: Path) -> dict[tuple[str, str], Row]:
    """The last result of each cell."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines if line.strip()]
    return {(row["model"], row["road"]): row for row in rows}


def wanted(chosen: argparse.Namespace) -> Iterator[tuple[Entry, list[str]]]:
    """The cells to run: roads of one setup together, setup by setup in the order of ``--roads``."""
    done = read(chosen.results)
    shown = rows_of(chosen.out.read_text(encoding="utf-8")) if chosen.missing else {}
    for setup in dict.fromkeys(SETUPS[road] for road in chosen.roads):
        together = [road for road in chosen.roads if SETUPS[road] == setup]
        for entry in filter(lambda entry: _is_chosen(entry, chosen), catalogue().values()):
            rows = {road: done.get((entry.name, road)) for road in together}
            roads = [r for r, row in rows.items() if not row or row["outcome"] in chosen.again]
            roads = [road for road in roads if (entry.name, road) not in shown]
            if roads:
                yield entry, roads


def _is_chosen(entry: Entry, chosen: argparse.Namespace) -> bool:
    if chosen.tested and entry.name not in CELLS:
        return False
    if chosen.families and entry.family not in chosen.families:
        return False
    return not chosen.only or any(part.lower() in entry.name.lower() for part in chosen.only)


def known_failures() -> dict[str, dict[str, str]]:
    """Reasons by model and road."""
    listed: dict[str, dict[str, str]] = yaml.safe_load(KNOWN.read_text(encoding="utf-8"))
    return listed


def unexpected(rows: dict[tuple[str, str], Row]) -> list[str]:
    """Cells that fail and are not listed, and listed ones that work."""
    listed = known_failures()
    found = []
    for (model, road), row in rows.items():
        reason = listed.get(model, {}).get(road)
        if row["outcome"] == "ok" and reason:
            found.append(f"{model}, {road}: works, and is listed in {KNOWN.name}")
        if row["outcome"] != "ok" and not reason:
            found.append(f"{model}, {road}: {row['error'].splitlines()[0]}")
    return found


def line(row: Row) -> str:
    name = f"{row['model']:44.44} {row['road']:12}"
    if row["outcome"] != "ok":
        return f"{name} {row['outcome']}: {row['error'].splitlines()[0]}"
    share = "" if row["share"] is None else f"{row['share']:7.1%}"
    noise = "" if row["sqnr"] is None else f"{row['sqnr']:6.1f} dB"
    speed = f"{row['speed']:.2f} × float" if "speed" in row else ""
    return f"{name} {share:7} {noise:9} {speed:14} {row['cpu']:6.1f} s"


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    comma = lambda text: [part for part in text.split(",") if part]  # noqa: E731
    parser.add_argument("--roads", type=comma, default=list(ROADS), help=", ".join(ROADS))
    parser.add_argument("--only", type=comma, help="parts of names, separated by commas")
    parser.add_argument("--families", type=comma, help=", ".join(FAMILIES))
    parser.add_argument("--tested", action="store_true", help="only models of tests/stock_cells.py")
    parser.add_argument("--missing", action="store_true", help="only cells that the page has not")
    parser.add_argument("--again", type=comma, default=[], help="outcomes that are run again")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for a cell")
    parser.add_argument("--budget", type=float, help="seconds after which no cell is begun")
    parser.add_argument("--results", type=Path, default=Path("out/stock.jsonl"))
    parser.add_argument("--render", action="store_true", help="run nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "models.md")
    chosen = parser.parse_args(arguments)
    for road in chosen.roads:
        if road not in ROADS:
            parser.error(f"no road {road!r}; one of {', '.join(ROADS)}")
    for family in chosen.families or ():
        if family not in FAMILIES:
            parser.error(f"no family {family!r}; one of {', '.join(FAMILIES)}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = options_of(arguments)
    chosen.results.parent.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what it started ends with it
    for name in () if chosen.render else LIBRARIES:
        import_module(name)
    for entry, roads in [] if chosen.render else list(wanted(chosen)):
        if chosen.budget is not None and time.perf_counter() - begin > chosen.budget:
            print("no time was left for the other cells")
            break
        for row in within(entry, roads, chosen.limit):
            with chosen.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(line(row), flush=True)
    page = chosen.out.read_text(encoding="utf-8") if chosen.out.exists() else ""
    rows = rows_of(page) | read(chosen.results)
    entries = list(catalogue().values())
    made = table(entries, rows, known_failures(), commits_of(page))
    chosen.out.write_text(made, encoding="utf-8")
    found = unexpected(rows)
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
