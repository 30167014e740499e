"""The speed of quantized models on the sources of this checkout beside those of another one.

    git worktree add ../before COMMIT
    python -m benchmarks.beside ../before --models linear mlp resnet18 --out out/beside.json

Both run this checkout's benchmark, on the same weights and inputs, each in a process of its own, one thread
on one core, in turns (the order changes from round to round). A figure is this checkout's time divided by the
other's: of the fastest call, and the median over the rounds of the fastest of a round. ``quantize``
chooses by timings, so two runs may have two plans, and ``backquant_kept`` is all on integers. A row whose
two models have another share on integers says so: it compares plans, not calls.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.models import MODELS, SMALL
from benchmarks.results import geometric_mean
from benchmarks.speed import ROOT, Worker, options_of, set_up

OURS = ("backquant_kept", "backquant", "backquant_library", "backquant_compiled")


def ratios(
    model: str, peer: str, sources: Sequence[Path], rounds: int
) -> tuple[float, float, bool]:
    """This checkout's CPU time for a call over the other's: best of all, median of the rounds, and whether
    both have the same share of the multiply-adds on integers."""
    options = options_of(["--clock", "cpu"])
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder)
        set_up(model, workspace)
        workers = [Worker(peer, model, workspace, options, source) for source in sources]
        for source, worker in zip(sources, workers, strict=True):
            if worker.failed:
                raise SystemExit(f"{model}, {peer}, {source}: {worker.failed}")
            worker.ask(pin=options.core)
        runs = min(worker.ask(warm=1.0)["runs"] for worker in workers)
        count = max(3, round(runs * options.seconds))
        times: list[list[float]] = [[], []]
        for number in range(rounds):
            for index in (0, 1) if number % 2 else (1, 0):
                times[index].append(min(workers[index].ask(time=count)[options.clock]))
        for worker in workers:
            worker.close()
    ours, others = times
    paired = statistics.median(a / b for a, b in zip(ours, others, strict=True))
    one, other = (worker.facts["integer_share"] for worker in workers)
    return min(ours) / min(others), paired, one == other


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--models", nargs="+", choices=[*MODELS, *SMALL], default=[*SMALL, *MODELS])
    parser.add_argument("--peers", nargs="+", choices=OURS, default=OURS[:1])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", type=Path, default=Path("out/beside.json"))
    options = parser.parse_args()
    sources = (ROOT / "src", options.other.resolve() / "src")
    if not sources[1].is_dir():
        parser.error(f"{options.other} is no checkout: it has no src")
    found: dict[str, dict[str, tuple[float, float, bool]]] = {}
    print("| model | " + " | ".join(f"{peer}: best, median" for peer in options.peers) + " |")
    print("|---" * (1 + len(options.peers)) + "|", flush=True)
    for model in options.models:
        found[model] = {
            peer: ratios(model, peer, sources, options.rounds) for peer in options.peers
        }
        cells = [
            f"{best:.3f}, {median:.3f}{'' if alike else ' (other plan)'}"
            for best, median, alike in found[model].values()
        ]
        print(f"| {model} | {' | '.join(cells)} |", flush=True)
    for peer in options.peers:
        best = geometric_mean([row[peer][0] for row in found.values()])
        print(f"{peer}: geometric mean of the best {best:.3f}", file=sys.stderr)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine(), "ratios": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
