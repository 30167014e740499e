"""make bench-quick: six models as ``quantize`` returns them, beside ONNX Runtime in one run of 4 minutes.

    python -m benchmarks.quick --out out/bench

A watch on regressions: a row's ratio to ONNX Runtime should be what ``benchmarks/LOG.md`` has for the
last release. Differences below 15 % say nothing on a machine that does other work. Measured as
``benchmarks.speed`` does, by CPU time. Compiled models are left out: compiling takes longer than this.
Prints markdown and writes ``quick.json``; rows for which no time was left are named, and the exit
status is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.results import Row, geometric_mean
from benchmarks.speed import measure
from benchmarks.speed import options_of as speed_options

MODELS = (
    *("resnet18", "mobilenet_v3_large", "efficientnet_b0"),
    *("shufflenet_v2_x1_0", "regnet_y_400mf", "densenet121"),
)
OURS, PEER = "backquant", "ort_int8"


def line(rows: Sequence[Row]) -> tuple[str, float | None]:
    """A row of the table, and how many times as fast as ONNX Runtime ours is."""
    found = {row.peer: row for row in rows}
    ours, peer, base = found[OURS], found[PEER], found["fp32"]
    failed = [f"{row.peer}: {row.failed}" for row in rows if row.failed]
    if failed:
        return f"| {ours.model} | failed: {'; '.join(failed)} | | | |", None
    ratio = ours.ratio(peer)
    quality = f"{ours.sqnr or 0:.1f} ({peer.sqnr or 0:.1f})"
    times = f"{ours.ratio(base):.2f} | {peer.ratio(base):.2f}"
    return f"| {ours.model} | {times} | {ratio:.2f} | {quality} |", ratio


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--budget", type=float, default=230.0, help="seconds for all models")
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args(arguments)
    peers = ("fp32", PEER, OURS)
    schedule = ("--rounds", "7", "--seconds", "0.2", "--clock", "cpu")
    speed = speed_options(["--peers", *peers, *schedule])
    start, longest = time.perf_counter(), 0.0
    left, ratios, rows = list(MODELS), [], []
    print("| model | ours × fp32 | ONNX Runtime × fp32 | ours / ONNX Runtime | SQNR, dB |")
    print("|---|---|---|---|---|", flush=True)
    while left and time.perf_counter() - start + longest <= options.budget:
        began = time.perf_counter()
        found = measure(left.pop(0), peers, speed)
        longest = max(longest, time.perf_counter() - began)
        text, ratio = line(found)
        print(text, flush=True)
        ratios += [] if ratio is None else [ratio]
        rows += [row.to_dict(found[0]) for row in found]
    if ratios:
        print(f"| geometric mean | | | {geometric_mean(ratios):.2f} | |")
    if left:
        print(f"\nno time was left for: {', '.join(left)}")
    options.out.mkdir(parents=True, exist_ok=True)
    data = {"machine": machine(), "rows": rows, "left": left}
    (options.out / "quick.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    return int(bool(left) or len(ratios) < len(MODELS))


if __name__ == "__main__":
    sys.exit(main())
