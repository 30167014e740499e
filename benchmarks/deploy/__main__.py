"""The table of deployment: models × targets, each cell in a process of its own.

    python -m benchmarks.deploy                                  # all that is missing in the results
    python -m benchmarks.deploy --models resnet18 minilm --targets executorch --rounds 15
    python -m benchmarks.deploy --render --out out/deploy        # no measuring: table and pictures

Cells are appended to ``--results`` (JSON lines) as they are done; those that are there already are left
alone, unless ``--again``. Within a cell our form, the runtime's float form and that of the runtime's own
quantizer get the same weights and inputs, and take turns on one thread of one core: of each turn the
fastest run counts, in CPU time, and a ratio is the median of the turns' ratios. What fails, or takes
longer than ``--limit``, is said under the table with the reason. Writes ``deploy.md``, ``deploy.json``
and pictures to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.deploy.cases import CASES
from benchmarks.deploy.cell import Cell, Form, append, read
from benchmarks.deploy.table import draw, table
from benchmarks.deploy.targets import TABLE, TARGETS

ROOT = Path(__file__).resolve().parents[2]


def commit() -> str:
    """Of the repository; with ``+`` when files that it has were changed; "" outside of one."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def events(
    model: str, target: str, without: Sequence[str], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], str]:
    """What the process of the cell said, and why it ended early ("" when it did not)."""
    source = [str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, source))}
    environment["OMP_NUM_THREADS"] = "1"
    command = [
        *(sys.executable, "-W", "ignore", "-m", "benchmarks.deploy.one"),
        *("--model", model, "--target", target, "--rounds", str(options.rounds)),
    ]
    command += ["--core", str(options.core)] if options.core is not None else []
    command += ["--without", *without] if without else []
    folder = options.out / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile("w+") as said, (folder / f"{model}-{target}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=said, stderr=log, env=environment, cwd=ROOT)
        try:
            status = process.wait(options.limit)
            ended = f"the process ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            ended = f"it took longer than {options.limit:.0f} s"
        said.seek(0)
        return [json.loads(line) for line in said if line.strip()], ended


def measure(model: str, target: str, options: argparse.Namespace) -> Cell:
    """The cell. A form in which the process dies is left out, and the others are measured."""
    given_up: dict[str, Form] = {}
    while True:
        found, ended = events(model, target, list(given_up), options)
        last = found[-1] if found else {}
        if "forms" in last:
            forms = {name: Form(**form) for name, form in last["forms"].items()}
            whole = Cell(model, target, commit(), {**forms, **given_up}, last["facts"])
            return Cell(**{**vars(whole), "settings": last["settings"]})
        at = next((event["at"] for event in reversed(found) if "at" in event), "the start")
        if at not in TARGETS[target].forms:
            raised = f"{ended}, at: {at}; see {model}-{target}.log"
            return Cell(model, target, commit(), given_up, failed=raised)
        given_up[at] = Form(failed=ended)


def write(options: argparse.Namespace) -> None:
    cells = read(options.results)
    (options.out / "deploy.md").write_text(table(cells), encoding="utf-8")
    data = [cell.to_dict() for cell in cells]
    (options.out / "deploy.json").write_text(json.dumps(data, indent=1), encoding="utf-8")


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TABLE))
    parser.add_argument("--rounds", type=int, default=11, help="turns of each form")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for a cell")
    parser.add_argument("--budget", type=float, help="seconds after which no cell is begun")
    parser.add_argument("--core", type=int, help="which core to pin to (default: the last)")
    parser.add_argument("--again", action="store_true", help="also cells that have a result")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--out", type=Path, default=Path("out/deploy"))
    parser.add_argument("--results", type=Path, help="default: deploy.jsonl in --out")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    options.results = options.results or options.out / "deploy.jsonl"
    if options.core is None and hasattr(os, "sched_getaffinity"):
        options.core = max(os.sched_getaffinity(0))
    return options


def wanted(options: argparse.Namespace) -> list[tuple[str, str]]:
    done = {(c.model, c.target) for c in read(options.results) if not options.again}
    every = [(model, target) for target in options.targets for model in options.models]
    return [pair for pair in every if pair not in done]


def main(arguments: Sequence[str] | None = None) -> int:
    options = options_of(arguments)
    begin = time.perf_counter()
    missing = [] if options.render else wanted(options)
    for position, (model, target) in enumerate(missing):
        start = time.perf_counter()
        if options.budget is not None and start - begin > options.budget:
            left = ", ".join(f"{m} on {t}" for m, t in missing[position:])
            print(f"no time was left for: {left}", file=sys.stderr)
            break
        cell = measure(model, target, options)
        append(cell, options.results)
        write(options)
        seconds = time.perf_counter() - start
        print(f"{table([cell])}({seconds:.0f} s)\n", file=sys.stderr, flush=True)
    write(options)
    cells = read(options.results)
    draw(cells, options.out / "deploy.png")
    print(table(cells))
    return int(any(cell.failed or cell.ours.failed for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
