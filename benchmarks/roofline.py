"""How near the compiled models come to what one core can do: products of 8-bit integers, and bytes read.

    python -m benchmarks.roofline --models resnet18 mobilenet_v2 --out out/bench

The two limits are measured by ``roofline.c``, which is compiled here: multiply-adds a second in a loop of
VNNI's products that stays in registers, and bytes a second of loops that read 256 MiB (memory) and 4 MiB (the
last cache). A row counts what its model cannot do without: the multiply-adds of its layers, and, in bytes of
8-bit values, each weight read once, and of each layer with weights the input read and the result written
once. ``roof`` is the time of the slower of the two, with bytes from the cache; weights larger than the
cache come from memory at least. CPU time of a call on one thread, the smallest of ``4 * --runs``. Prints
markdown and writes ``roofline.json``. CPUs with AVX-512 VNNI only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import backquant
from benchmarks.machine import machine
from benchmarks.models import MODELS, build
from benchmarks.profile_rows import milliseconds

SOURCE = Path(__file__).with_suffix(".c")
HEAD = (
    "| model | G multiply-adds | MB | roof, ms | compiled, ms | of the roof | of the products "
    "| of the bytes |\n"
    "|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Limits:
    """What one core can do in a second: multiply-adds, and bytes read from memory and from the last cache."""

    products: float
    memory: float
    cache: float


@dataclass(frozen=True)
class Work:
    """What a call of a model cannot do without."""

    macs: int
    bytes: int


@dataclass(frozen=True)
class RoofRow:
    """A model: its ``work``, the time that the limits leave it, and the time that it takes (ms)."""

    model: str
    work: Work
    by_products: float
    by_bytes: float
    ms: float

    def __str__(self) -> str:
        roof = max(self.by_products, self.by_bytes)
        shares = (100 * limit / self.ms for limit in (roof, self.by_products, self.by_bytes))
        cells = (f"{self.work.macs / 1e9:.2f}", f"{self.work.bytes / 1e6:.1f}", f"{roof:.2f}")
        return (
            " | ".join(
                (f"| {self.model}", *cells, f"{self.ms:.2f}", *(f"{s:.0f} %" for s in shares))
            )
            + " |"
        )


def measured_limits() -> Limits:
    """Compiles and runs ``roofline.c``. Raises ``RuntimeError`` without a compiler or VNNI."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise RuntimeError("no C compiler: install gcc")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "roofline"
        command = [compiler, "-O3", "-mavx512f", "-mavx512vnni", "-o", str(program), str(SOURCE)]
        subprocess.run(command, check=True)
        done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError("this CPU has no AVX-512 VNNI")
    return Limits(**json.loads(done.stdout))


def work_of(model: nn.Module, quantized: backquant.QuantizedModel, x: Any) -> Work:
    """The multiply-adds of the model, and the bytes of its layers with weights."""
    layers = [
        part for part in model.modules() if next(part.parameters(recurse=False), None) is not None
    ]
    count = sum(weight.numel() for layer in layers for weight in layer.parameters(recurse=False))
    moved = [count]

    def note(_: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        tensors = (value for value in (*args, result) if isinstance(value, torch.Tensor))
        moved.append(sum(tensor.numel() for tensor in tensors))

    weighted = [part for part in layers if getattr(part, "weight", torch.zeros(1)).dim() > 1]
    handles = [layer.register_forward_hook(note) for layer in weighted]
    with torch.no_grad():
        model(*as_tuple(x))
    for handle in handles:
        handle.remove()
    return Work(quantized.report.multiply_adds, sum(moved))


def as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def row_of(name: str, limits: Limits, runs: int) -> RoofRow:
    model = build(name)
    torch.manual_seed(1)
    batches = [MODELS[name].sample(1) for _ in range(2)]
    quantized = backquant.quantize(model, batches[0], calibration=batches)
    work = work_of(model, quantized, batches[0])
    compiled: Any = quantized.compile()
    ms = milliseconds(lambda x: compiled(*as_tuple(x)), batches[0], runs)
    return RoofRow(
        name, work, 1e3 * work.macs / limits.products, 1e3 * work.bytes / limits.cache, ms
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("out/bench"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    limits = measured_limits()
    print(
        f"{limits.products / 1e9:.0f} G multiply-adds a second; {limits.memory / 1e9:.1f} GB a second from "
        f"memory, {limits.cache / 1e9:.1f} from the last cache\n\n{HEAD}"
    )
    rows = []
    for name in options.models:
        rows.append(row_of(name, limits, options.runs))
        print(rows[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    data = {"machine": machine(), "limits": asdict(limits), "rows": [asdict(row) for row in rows]}
    (options.out / "roofline.json").write_text(json.dumps(data, indent=1, default=str))


if __name__ == "__main__":
    main()
