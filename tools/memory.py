"""Resident memory over many calls, cycles and batches: flat after warm-up.

    python tools/memory.py calls --count 10000 --backend x86
    python tools/memory.py shapes --count 2000        # each of them another one
    python tools/memory.py cycles --count 200
    python tools/memory.py batches --count 2000
    python tools/memory.py histogram --count 200
    python tools/memory.py compiled --count 10000
    python tools/memory.py compiles --count 200       # a C++ compiler each, some 10 s

calls: one model, a shape in turn out of 40. shapes: each step is a shape that was not there before, three
times, so that it is recorded; oneDNN keeps 64 primitives then instead of 1,024, which takes longer than this
to fill (a float model grows meanwhile, too). cycles: quantize, save, load, call, drop. batches: calibration.
histogram: an observer that meets 1e30, denormals and zeros among normal values. compiled: calls of one with a
dynamic batch, a third of them of sizes that the code was not made for. compiles: quantize, compile, call,
drop; Inductor's folders on the disk are counted, too. The first half is warm-up;
of the second half the median of its last fifth may exceed that of its first fifth by ``TOLERANCE``. Exit
status 1 where it does.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if "shapes" in sys.argv[1:2]:  # read when torch is loaded
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")

import torch
from torch import nn

import backquant

TOLERANCE = 8.0  # MiB: what allocators keep, and give back later
_PAGE = os.sysconf("SC_PAGE_SIZE")
Step = Callable[[int], object]


def resident() -> float:
    """MiB of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * _PAGE / 2**20


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Hardswish()).eval()


def quantized(backend: str) -> nn.Module:
    data = [torch.randn(2, 3, 16, 16)]
    return backquant.quantize(model(), backend=backend, calibration=data, slower="keep")


def calls(backend: str) -> Step:
    made = quantized(backend)
    return lambda number: made(torch.zeros(1 + number % 5, 3, 8 + number % 8, 16))


def shapes(backend: str) -> Step:
    made = quantized(backend)

    def step(number: int) -> None:
        image = torch.zeros(1, 3, 8 + number % 50, 8 + number // 50)
        for _ in range(3):  # looked at, recorded, replayed
            made(image)

    return step


def cycles(backend: str) -> Step:
    folder = tempfile.mkdtemp()

    def step(_: int) -> None:
        path = Path(folder) / "model.bq"
        backquant.save(quantized(backend), path)
        backquant.load(path)(torch.zeros(1, 3, 16, 16))
        path.unlink()
        gc.collect()

    return step


def batches(backend: str) -> Step:
    prepared = backquant.prepare_fx(
        model(), backquant.default_mapping(backend), torch.zeros(1, 3, 16, 16)
    )

    def step(number: int) -> None:
        with torch.no_grad():
            prepared(torch.randn(4, 3, 32, 32) * (1 + number % 3))

    return step


def histogram(_: str) -> Step:
    observer = backquant.HistogramObserver()
    odd = torch.tensor([1e30, -1e30, 1e-45, -1e-40, 0.0, 3e37, 1e-38])

    def step(number: int) -> None:
        spread = torch.randn(20_000) * 2.0 ** torch.randint(-126, 120, (20_000,))
        observer(torch.cat([spread, odd * (1 + number % 2)]))
        observer.calculate_qparams()
        bins = observer.bin_key.numel()
        assert bins <= 65_280, bins

    return step


def compiled(backend: str) -> Step:
    made = quantized(backend).compile(dynamic_shapes={"input": {0: "batch"}})
    return lambda number: made(torch.zeros(1 + number % 7, 3, 16, 16 + number % 3 // 2))


def compiles(backend: str) -> Step:
    folder = Path(tempfile.mkdtemp())
    tempfile.tempdir = os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)

    def step(number: int) -> None:
        quantized(backend).compile()(torch.zeros(2, 3, 16, 16))
        gc.collect()
        torch.compiler.reset()
        if number % 10 == 9:
            files = [item.stat().st_size for item in folder.rglob("*") if item.is_file()]
            mapped = Path("/proc/self/maps").read_text().count("r-xp")
            print(
                f"{number + 1}: {resident():.0f} MiB, {mapped} libraries; on the disk {len(files)} files,"
                f" {sum(files) / 2**20:.0f} MiB",
                flush=True,
            )

    return step


KINDS = {
    "calls": calls,
    "shapes": shapes,
    "cycles": cycles,
    "batches": batches,
    "histogram": histogram,
    "compiled": compiled,
    "compiles": compiles,
}


def grown(step: Step, count: int) -> tuple[float, float]:
    """MiB at the start of the second half, and how many more there are at its end."""
    found = []
    for number in range(count):
        step(number)
        if number >= count // 2:
            found.append(resident())
    part = max(len(found) // 5, 1)
    start = statistics.median(found[:part])
    return start, statistics.median(found[-part:]) - start


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--backend", default="x86")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start, more = grown(KINDS[chosen.kind](chosen.backend), chosen.count)
    print(f"{chosen.kind} {chosen.backend} {chosen.count}: {start:.1f} MiB, then {more:+.2f} MiB")
    return 0 if more <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
