"""One cell of the table, in a process of its own: prepare all forms, then time them in turns.

Events go to standard output, a line of JSON each: ``{"at": form}`` before a form is prepared,
``{"failed": [form, reason]}`` after it raised, and at last ``{"forms": …, "facts": …}``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.deploy.cases import CASES, Case
from benchmarks.deploy.cell import FORMS
from benchmarks.deploy.targets import TARGETS, Contender
from benchmarks.machine import machine
from benchmarks.peers import Prepared, Task
from benchmarks.worker import pin

__all__ = ["main"]

TURN = 0.15  # seconds of CPU time


class Runner:
    """What the forms of one cell share. ``without``: forms that are not tried, with the reason."""

    def __init__(self, options: argparse.Namespace, out: TextIO) -> None:
        self.options, self.out = options, out
        self.contender: Contender = TARGETS[options.target]
        self.prepared: dict[str, Prepared] = {}
        self.found: dict[str, dict[str, Any]] = {}

    def say(self, **event: Any) -> None:
        self.out.write(json.dumps(event) + "\n")
        self.out.flush()

    def prepare(self, form: str, case: Case, wanted: list[Any], workspace: Path) -> None:
        self.say(at=form)
        model = copy.deepcopy(case.model)
        name, start = self.options.model, time.perf_counter()
        task = Task(name, model, case.calibration, 1, workspace, case.transformer)
        try:
            made = self.contender.prepare(form)(task)
            seconds = time.perf_counter() - start
            got = [made.read(made.run(made.feed(x))) for x in case.tests]
        except Exception as error:  # whatever a quantizer raises is the reason in the table
            lines = str(error).strip().splitlines() or [""]
            reason = f"{type(error).__name__}: {lines[0]}"[:300]
            self.say(failed=[form, reason])
            self.found[form] = {"failed": reason}
            return
        self.prepared[form] = made
        self.found[form] = {"quality": case.quality(wanted, got), "seconds": round(seconds, 1)}

    def time(self, case: Case) -> None:
        """Turns of all forms, the fastest run of each; CPU time of the process."""
        self.say(at="timing")
        if self.options.core is not None:
            pin(self.options.core)
        feeds = {form: item.feed(case.tests[0]) for form, item in self.prepared.items()}
        counts = {}
        for form, item in self.prepared.items():
            item.run(feeds[form])
            counts[form] = min(200, max(3, round(TURN / max(1e-5, _timed(item, feeds[form], 2)))))
        turns: dict[str, list[float]] = {form: [] for form in self.prepared}
        for _ in range(self.options.rounds):
            for form, item in self.prepared.items():
                turns[form].append(_timed(item, feeds[form], counts[form]) * 1000)
        for form, times in turns.items():
            self.found[form]["turns"] = times


def _timed(prepared: Prepared, feed: Any, count: int) -> float:
    best = float("inf")
    for _ in range(count):
        start = time.process_time()
        prepared.run(feed)
        best = min(best, time.process_time() - start)
    return best


def run(options: argparse.Namespace, out: TextIO) -> None:
    runner = Runner(options, out)
    runner.say(at="model")
    case = CASES[options.model]()
    wanted = [case.model(*x).numpy() for x in case.tests]
    with tempfile.TemporaryDirectory() as folder:
        for form in FORMS:
            if form not in options.without:
                runner.prepare(form, case, wanted, Path(folder))
        runner.time(case)
    facts = runner.prepared["ours"].facts if "ours" in runner.prepared else {}
    versions = {name: metadata.version(name) for name in runner.contender.packages}
    settings = {"rounds": options.rounds, "machine": machine(), "versions": versions}
    runner.say(forms=runner.found, facts=facts, settings=settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, choices=CASES)
    parser.add_argument("--target", required=True, choices=TARGETS)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--core", type=int)
    parser.add_argument("--without", nargs="*", default=[], choices=FORMS)
    options = parser.parse_args()
    # Runtimes print; events go where only the parent reads.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    with torch.no_grad():
        run(options, out)


if __name__ == "__main__":
    main()
