"""make bench: the speed of quantized models, ours beside the peers', on the same inputs in one run.

    python -m benchmarks.speed --models resnet18 mobilenet_v2 --out out/bench

Each peer prepares each model in a process of its own; some of them at the same time, which is not
timed. Then each process is pinned to one core and they take turns, so that what else the machine does
meets all of them. A peer that fails, or takes too long to prepare, is a row with its reason. Models for
which there is no time left within ``--budget`` are left out, and listed. Writes ``speed.json``,
``speed.md`` and ``speed.png``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import machine
from benchmarks.models import MODELS, build, entry_of
from benchmarks.peers import PEERS
from benchmarks.plot import draw
from benchmarks.results import Row, sqnr, table

CALIBRATION, INPUTS = 4, 4
ROOT = Path(__file__).resolve().parent.parent


class Worker:
    """A peer's process; ``failed`` says why it has none."""

    def __init__(
        self,
        peer: str,
        model: str,
        workspace: Path,
        options: argparse.Namespace,
        sources: Path = ROOT / "src",
    ) -> None:
        self.peer, self.facts, self.failed = peer, {}, ""
        threads = options.threads
        source = [str(ROOT), str(sources), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(filter(None, source)),
        }
        command = [
            *(sys.executable, "-W", "ignore", "-m", "benchmarks.worker", "--peer", peer),
            *("--model", model, "--workspace", str(workspace), "--threads", str(threads)),
        ]
        self.log = workspace / f"{peer}.log"
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            env=environment,
            text=True,
        )
        late = threading.Timer(options.prepare_limit, self.process.kill)
        late.start()
        answer = self._read()
        if not late.is_alive() and "ready" not in answer:
            answer = {"failed": f"the preparation took longer than {options.prepare_limit} s"}
        late.cancel()
        self.facts = answer.get("ready", {})
        self.failed = answer.get("failed", "")
        if self.failed:
            self.close()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            return {"failed": f"the process ended with status {self.process.wait()}"}
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        if "failed" in answer:
            raise RuntimeError(f"{self.peer}: {answer['failed']}; see {self.log}")
        return answer

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()


@dataclass(frozen=True)
class Schedule:
    """``rounds`` turns of each peer, each of so many runs that it takes about ``seconds``."""

    rounds: int
    seconds: float
    clock: str

    def run(self, workers: Sequence[Worker]) -> dict[str, list[float]]:
        counts = {}
        for worker in workers:
            runs = worker.ask(warm=0.5)["runs"]
            counts[worker.peer] = max(2, round(runs / 0.5 * self.seconds))
        found: dict[str, list[float]] = {worker.peer: [] for worker in workers}
        for _ in range(self.rounds):
            for worker in workers:
                times = worker.ask(time=counts[worker.peer])[self.clock]
                found[worker.peer].append(min(times) * 1e3)
        return found


def set_up(model: str, workspace: Path, batch: int = 1) -> None:
    """Weights and inputs, for all peers the same; as many samples for calibration, whatever the batch."""
    made, entry = build(model), entry_of(model)
    torch.manual_seed(1)
    stored = {
        "weights": made.state_dict(),
        "calibration": [entry.sample(batch) for _ in range(max(1, CALIBRATION // batch))],
        "inputs": [entry.sample(batch) for _ in range(max(1, INPUTS // batch))],
    }
    torch.save(stored, workspace / "task.pt")


def families(peers: Sequence[str]) -> list[list[str]]:
    """Peers that share files of a model are prepared one after the other."""
    found: dict[str, list[str]] = {}
    for peer in peers:
        found.setdefault(PEERS[peer][0], []).append(peer)
    return list(found.values())


def prepared(
    model: str, peers: Sequence[str], workspace: Path, options: argparse.Namespace
) -> list[Worker]:
    def several(family: Sequence[str]) -> list[Worker]:
        made = []
        for peer in family:
            made.append(Worker(peer, model, workspace, options))
            said = f"failed: {made[-1].failed}" if made[-1].failed else "ready"
            print(f"{model}: {peer} {said}", file=sys.stderr, flush=True)
        return made

    with ThreadPoolExecutor(options.jobs) as pool:
        every = [worker for some in pool.map(several, families(peers)) for worker in some]
    return sorted(every, key=lambda worker: peers.index(worker.peer))


def measure(model: str, peers: Sequence[str], options: argparse.Namespace) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        set_up(model, workspace, options.batch)
        workers = prepared(model, peers, workspace, options)
        running = [worker for worker in workers if not worker.failed]
        if options.core is not None:
            for worker in running:
                worker.ask(pin=options.core)
        times = Schedule(options.rounds, options.seconds, options.clock).run(running)
        for worker in running:
            worker.close()
        reference = np.load(workspace / "fp32.npy")
        return [_row(model, worker, times, workspace, reference) for worker in workers]


def _row(
    model: str, worker: Worker, times: dict[str, list[float]], workspace: Path, reference: Any
) -> Row:
    if worker.failed:
        return Row(model, worker.peer, failed=worker.failed)
    outputs = np.load(workspace / f"{worker.peer}.npy")
    quality = None if worker.peer == "fp32" else sqnr(reference, outputs)
    return Row(model, worker.peer, tuple(times[worker.peer]), quality, facts=worker.facts)


def write(rows: Sequence[Row], options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    base = {row.model: row for row in rows if row.peer == "fp32"}
    settings = {key: str(value) for key, value in vars(options).items() if key != "out"}
    data = {
        "machine": machine(),
        "settings": settings,
        "rows": [row.to_dict(base.get(row.model)) for row in rows],
    }
    titles = {peer: PEERS[peer][2] for peer in options.peers}
    (options.out / "speed.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    (options.out / "speed.md").write_text(table(rows, titles) + "\n", encoding="utf-8")
    draw(rows, titles, options.out / "speed.png")


def options_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--threads", default="1", help="a number, or all (then nothing is pinned)")
    parser.add_argument("--batch", type=int, default=1, help="samples in a call")
    parser.add_argument("--core", type=int, help="which core to pin to (default: the last)")
    parser.add_argument("--rounds", type=int, default=11, help="turns of each peer")
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a turn")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: the process's CPU time, for one thread on a busy machine",
    )
    parser.add_argument(
        "--jobs", type=int, default=min(4, os.cpu_count() or 1), help="peers prepared at once"
    )
    parser.add_argument("--prepare-limit", type=float, default=240.0, help="seconds for one peer")
    parser.add_argument("--budget", type=float, help="seconds for all models")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args(arguments)
    options.peers = ["fp32", *(peer for peer in options.peers if peer != "fp32")]
    everything = options.threads == "all"
    options.threads = os.cpu_count() if everything else int(options.threads)
    if not everything and options.core is None and hasattr(os, "sched_getaffinity"):
        options.core = max(os.sched_getaffinity(0))
    if options.threads != 1:
        options.core = None
    return options


def main() -> None:
    options = options_of()
    start = time.perf_counter()
    rows: list[Row] = []
    titles = {peer: PEERS[peer][2] for peer in options.peers}
    left, longest = list(options.models), 0.0
    while left:
        now = time.perf_counter()
        if options.budget is not None and now - start + longest > options.budget:
            break
        found = measure(left.pop(0), options.peers, options)
        rows += found
        write(rows, options)
        print(table(found, titles), file=sys.stderr)
        longest = max(longest, time.perf_counter() - now)
    print(table(rows, titles))
    if left:
        print(f"\nno time was left for: {', '.join(left)}")


if __name__ == "__main__":
    main()
