"""One peer on one model, in a process of its own: prepare, then answer requests until the input ends.

Requests and answers are JSON, a line each. The last line of the preparation is
``{"ready": facts}`` or ``{"failed": reason}``. ``{"warm": seconds}`` runs that long;
``{"time": n}`` gives the wall and CPU seconds of ``n`` runs; ``{"pin": core}`` puts every thread of the
process on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from benchmarks.models import entry_of
from benchmarks.peers import Inputs, Prepared, Task, load

__all__ = ["main"]


def task_of(model: str, workspace: Path, threads: int) -> tuple[Task, list[Inputs]]:
    """The model with the weights and inputs that all its peers get."""
    stored = torch.load(workspace / "task.pt", weights_only=True)
    entry = entry_of(model)
    made = entry.make().eval()
    made.load_state_dict(stored["weights"])
    calibration, inputs = ([(x,) for x in stored[key]] for key in ("calibration", "inputs"))
    return Task(model, made, calibration, threads, workspace, entry.transformer), inputs


def timed(prepared: Prepared, feed: Any, count: int) -> dict[str, list[float]]:
    wall, cpu = [], []
    for _ in range(count):
        cpu_start, start = time.process_time(), time.perf_counter()
        prepared.run(feed)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    return {"wall": wall, "cpu": cpu}


def pin(core: int) -> None:
    """Linux: also threads that the peer has started."""
    tasks = Path("/proc/self/task")
    for thread in tasks.iterdir() if tasks.exists() else ():
        os.sched_setaffinity(int(thread.name), {core})


def serve(prepared: Prepared, inputs: list[Inputs], out: TextIO) -> None:
    feed = prepared.feed(inputs[0])
    for line in sys.stdin:
        request = json.loads(line)
        if "warm" in request:
            end, count = time.perf_counter() + request["warm"], 0
            while time.perf_counter() < end or count < 3:
                timed(prepared, feed, 1)
                count += 1
            answer: dict[str, Any] = {"runs": count}
        elif "pin" in request:
            pin(request["pin"])
            answer = {}
        else:
            answer = timed(prepared, feed, request["time"])
        out.write(json.dumps(answer) + "\n")
        out.flush()


def prepare(arguments: argparse.Namespace) -> tuple[Prepared, list[Inputs], dict[str, Any]]:
    task, inputs = task_of(arguments.model, arguments.workspace, arguments.threads)
    start = time.perf_counter()
    prepared = load(arguments.peer)(task)
    seconds = time.perf_counter() - start
    outputs = [prepared.read(prepared.run(prepared.feed(x))) for x in inputs]
    np.save(arguments.workspace / f"{arguments.peer}.npy", np.concatenate(outputs))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    facts = {**prepared.facts, "prepare_seconds": seconds, "peak_rss_mib": peak}
    return prepared, inputs, facts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    # Peers print; answers go where only the parent reads.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    with torch.no_grad():
        try:
            prepared, inputs, facts = prepare(arguments)
        except Exception as error:  # whatever a peer raises is its row's reason
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            out.write(json.dumps({"failed": reason[:300]}) + "\n")
            out.flush()
            raise
        out.write(json.dumps({"ready": facts}) + "\n")
        out.flush()
        serve(prepared, inputs, out)


if __name__ == "__main__":
    main()
