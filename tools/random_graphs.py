"""Random models beside PyTorch's quantization, or beside our own reference model, by the thousand.

    python tools/random_graphs.py --count 5000 --seed 0 --backends native,fbgemm,qnnpack,x86,onednn
    python tools/random_graphs.py --against reference --count 20000 --results generated.jsonl

Beside PyTorch's, each model is captured, fused, matched, prepared, calibrated, converted and lowered by
both on each backend. What each comparison is, and which differences have a cause, is told by
``tests/against_torch/compare.py``. Beside the reference model, models of families with odd shapes and
extreme values take the backends in turn; ``tests/generated/check.py`` says what is compared.

With ``--results FILE`` each outcome is appended to a file of JSON lines as it is known, and what the
file holds already is not run again: stop the command at any time and repeat it to go on. Exit status:
0 when every difference has its cause, 1 otherwise, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = ("native", "fbgemm", "qnnpack", "x86", "onednn")
Key = tuple[int, str]
Row = dict[str, Any]


def run(key: Key) -> Row:
    """Compare one model on one backend; the outcome as JSON-able values."""
    _find_packages()
    import torch

    from against_torch.compare import compare

    torch.set_num_threads(1)
    found = compare(*key)
    row = asdict(found)
    row["lowered"] = None if found.lowered is None else found.lowered.kind
    row["kernels"] = found.kernels.checked
    return row


def run_generated(key: Key) -> Row:
    """One model beside our reference model; without a label where nothing is wrong."""
    _find_packages()
    import torch

    from generated.check import check

    torch.set_num_threads(1)
    row = asdict(check(*key))
    return row if row["findings"] else {**row, "label": ""}


def _find_packages() -> None:
    for folder in (str(ROOT / "tests"), str(ROOT / "src")):
        if folder != sys.path[0]:
            sys.path.insert(
                0, folder
            )  # before this folder, whose tools have names of packages there


def run_all(
    keys: Sequence[Key], jobs: int, console: Console, one: Callable[[Key], Row]
) -> Iterator[Row]:
    """Compare all by ``one``, in ``jobs`` processes, with a bar on the terminal."""
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        yield from progress.track(
            _results(keys, jobs, one), total=len(keys), description="random graphs"
        )


def _results(keys: Sequence[Key], jobs: int, one: Callable[[Key], Row]) -> Iterator[Row]:
    if jobs == 1:
        yield from map(one, keys)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(one, keys, chunksize=4)


def known(path: Path | None) -> dict[Key, Row]:
    """Rows of an earlier run; a last line that was cut off is left out."""
    found: dict[Key, Row] = {}
    if path is None or not path.exists():
        return found
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[row["seed"], row["backend"]] = row
    return found


def appended(rows: Iterable[Row], path: Path | None) -> Iterator[Row]:
    """The rows, each written to the file as it comes."""
    if path is None:
        yield from rows
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_bytes() if path.exists() else b""
    with path.open("a", encoding="utf-8") as file:
        if before and not before.endswith(b"\n"):
            file.write("\n")  # an earlier run was cut off within a line
        for row in rows:
            file.write(json.dumps(row) + "\n")
            file.flush()
            yield row


def agreement(rows: Sequence[Row]) -> Table:
    """Per backend: how many models are equal, explained, unexplained."""
    table = Table(title="reference models beside PyTorch's")
    for name in ("backend", "models", "equal", "explained", "unexplained", "kernels checked"):
        table.add_column(name, justify="left" if name == "backend" else "right")
    for backend in dict.fromkeys(row["backend"] for row in rows):
        own = [row for row in rows if row["backend"] == backend]
        count = Counter(row["verdict"] for row in own)
        table.add_row(
            backend,
            str(len(own)),
            *(str(count[name]) for name in ("equal", "explained", "unexplained")),
            str(sum(row["kernels"] for row in own)),
        )
    return table


def lowered(rows: Sequence[Row]) -> Table:
    """Per backend: outputs of the lowered models beside PyTorch's."""
    table = Table(title="outputs of lowered models whose reference models are equal")
    kinds = sorted({row["lowered"] for row in rows if row["lowered"]})
    table.add_column("backend")
    for kind in kinds:
        table.add_column(kind, justify="right")
    for backend in dict.fromkeys(row["backend"] for row in rows):
        count = Counter(row["lowered"] for row in rows if row["backend"] == backend)
        table.add_row(backend, *(str(count[kind]) for kind in kinds))
    return table


def causes(rows: Sequence[Row]) -> Table:
    """Each class of disagreement: in how many models, and in how many it is the only one."""
    table = Table(title="differences by cause")
    table.add_column("cause")
    table.add_column("models", justify="right")
    table.add_column("the only cause", justify="right")
    table.add_column("first seed")
    every = Counter(cause for row in rows for cause in row["causes"])
    for cause, count in every.most_common():
        with_it = [row for row in rows if cause in row["causes"]]
        alone = sum(len(row["causes"]) == 1 for row in with_it)
        first = min(with_it, key=lambda row: row["seed"])
        table.add_row(cause, str(count), str(alone), f"{first['seed']} {first['backend']}")
    return table


def generated(rows: Sequence[Row]) -> Table:
    """Per family: models, what was compared, what is wrong."""
    table = Table(title="generated models beside the reference model")
    names = ("family", "models", "inputs", "integer results", "refused", "wrong")
    for name in names:
        table.add_column(name, justify="left" if name == "family" else "right")
    for family in (*sorted({row["family"] for row in rows}), "all"):
        own = [row for row in rows if family in ("all", row["family"])]
        figures = (
            len(own),
            sum(row["calls"] for row in own),
            sum(row["compared"] for row in own),
            sum(bool(row["refused"]) for row in own),
            sum(bool(row["findings"]) for row in own),
        )
        table.add_row(family, *map(str, figures))
    return table


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", choices=("torch", "reference"), default="torch")
    parser.add_argument(
        "--count", type=int, default=200, help="models per backend; beside the reference, in all"
    )
    parser.add_argument("--seed", type=int, default=0, help="the first model's")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="names, with commas")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument(
        "--results", type=Path, help="file of JSON lines to append to and go on from"
    )
    found = parser.parse_args(given)
    found.backends = found.backends.split(",")
    unknown = [name for name in found.backends if name not in BACKENDS]
    if unknown:
        parser.error(f"unknown backend {unknown[0]!r}; choose from {', '.join(BACKENDS)}")
    if found.count < 1 or found.jobs < 1:
        parser.error("--count and --jobs are at least 1")
    return found


def _rows(wanted: Sequence[Key], asked: argparse.Namespace, one: Callable[[Key], Row]) -> list[Row]:
    """The rows of all ``wanted``: known ones, and those that are run now."""
    done = known(asked.results)
    missing = [key for key in wanted if key not in done]
    fresh = appended(run_all(missing, asked.jobs, Console(stderr=True), one), asked.results)
    done |= {(row["seed"], row["backend"]): row for row in fresh}
    return [done[key] for key in wanted]


def main(given: Sequence[str] | None = None) -> int:
    asked = arguments(given)
    console = Console()
    seeds = range(asked.seed, asked.seed + asked.count)
    if asked.against == "reference":
        # each family meets each backend
        turns = ((seed, (seed // 10) % len(asked.backends)) for seed in seeds)
        rows = _rows([(seed, asked.backends[turn]) for seed, turn in turns], asked, run_generated)
        console.print(generated(rows))
        wrong = [row for row in rows if row["findings"]]
        for row in wrong:
            console.print(
                f"seed {row['seed']}, {row['backend']}: {row['findings'][0]}", markup=False
            )
        return 1 if wrong else 0
    wanted = [(seed, backend) for seed in seeds for backend in asked.backends]
    rows = _rows(wanted, asked, run)
    for table in (agreement(rows), lowered(rows), causes(rows)):
        console.print(table)
    wrong = [row for row in rows if row["verdict"] == "unexplained"]
    for row in wrong:
        console.print(f"seed {row['seed']}, {row['backend']}: {row['detail']}", markup=False)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
