"""How long commands take from start to exit, beside the interpreter alone and ``import torch``.

Processes take turns, one of each kind a round; medians of CPU and wall seconds over the rounds, after
one round that writes byte code and fills the disk's cache. Commands that need torch are compared with
importing it: what is above 1 is ours.

    python -m benchmarks.startup --rounds 7 --out out/startup.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import backquant

BASE, TORCH = "python", "import torch"
RUNS: dict[str, list[str]] = {
    BASE: ["-c", "pass"],
    TORCH: ["-c", "import torch"],
    "import backquant": ["-c", "import backquant"],
    "backquant --help": ["-m", "backquant", "--help"],
    "backquant schema": ["-m", "backquant", "schema"],
    "backquant backends": ["-m", "backquant", "backends"],
    "backquant show x86": ["-m", "backquant", "show", "x86"],
    "backquant diff x86 qnnpack": ["-m", "backquant", "diff", "x86", "qnnpack"],
    "backquant check x86": ["-m", "backquant", "check", "x86"],
    "import backquant.api": ["-c", "from backquant import quantize"],
    "import of load": ["-c", "from backquant import load"],
}


def once(arguments: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """CPU and wall seconds of one process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, check=False
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1):  # 1: two backends differ
        raise SystemExit(done.stderr.decode())
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def measured(rounds: int) -> dict[str, dict[str, float]]:
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder, "PYTHONPYCACHEPREFIX": folder}
        environment["PYTHONPATH"] = str(Path(backquant.__file__).parents[1])
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for number in range(rounds + 1):
            for name, arguments in RUNS.items():
                found = once(arguments, environment)
                if number:
                    times[name].append(found)
    rows = {}
    for name, pairs in times.items():
        cpu, wall = zip(*pairs, strict=True)
        of_torch = [own[0] / base[0] for own, base in zip(pairs, times[TORCH], strict=True)]
        rows[name] = {
            "cpu_s": statistics.median(cpu),
            "wall_s": statistics.median(wall),
            "cpu_of_import_torch": statistics.median(of_torch),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = measured(options.rounds)
    print(f"{'':28}   CPU s   wall s   CPU / import torch")
    for name, row in rows.items():
        cpu, wall, share = row.values()
        print(f"{name:28} {cpu:7.3f}  {wall:7.3f}   {share:7.2f}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({"rounds": options.rounds, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
