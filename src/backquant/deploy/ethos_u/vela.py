"""Arm's Vela: runs it on a file, and reads what it says.

It prints the operators that it leaves to the CPU with the reason, names them by the tensor that they
write, and leaves a table of figures beside the compiled file.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from backquant.errors import ExportError

__all__ = ["ACCELERATORS", "Compiled", "compile_file", "parse_output"]

ACCELERATORS = (
    *(f"ethos-u55-{macs}" for macs in (32, 64, 128, 256)),
    *(f"ethos-u65-{macs}" for macs in (256, 512)),
    *(f"ethos-u85-{macs}" for macs in (128, 256, 512, 1024, 2048)),
)
_ON_THE_CPU = re.compile(r"^Warning \(supported operators\) operator: (\w+), ofm: '(.*)'$")
_COUNT = re.compile(r"^(CPU|NPU) operators = (\d+)")
_MAIN = "from ethosu.vela.vela import main; main()"
_SECONDS = 1800  # a compilation that takes longer is stuck


@dataclass(frozen=True)
class Compiled:
    """``on_the_cpu``: why Vela leaves an operator to the CPU, by the name of the tensor that it writes.
    ``operators``: how many run on the NPU and on the CPU."""

    on_the_cpu: Mapping[str, str]
    operators: Mapping[str, int]
    cycles: int
    sram_kib: float
    flash_kib: float
    milliseconds: float


def compile_file(path: Path, place: Path, accelerator: str, options: Mapping[str, str]) -> Compiled:
    """Compile ``path`` to the file ``place``. Raises ``ExportError`` with Vela's words where it fails."""
    folder = path.parent / "vela"
    flags = [f"--{name}={value}" for name, value in options.items()]
    command = [sys.executable, "-c", _MAIN, str(path), "--output-dir", str(folder)]
    command += [f"--accelerator-config={accelerator}", *flags]
    try:
        done = subprocess.run(  # the arguments are ours, and checked
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ExportError(
            f"Vela did not end within {_SECONDS} s", where=accelerator, fix="a smaller model"
        ) from error
    made = folder / f"{path.stem}_vela.tflite"
    tables = sorted(folder.glob("*_summary_*.csv")) if folder.is_dir() else []
    if done.returncode or not made.is_file() or not tables:
        words = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise ExportError(
            f"Vela does not compile the file: {' '.join(words)}",
            where=accelerator,
            fix="the file itself is what --to litert writes: compile it by hand, or leave that part out",
        )
    text = tables[-1].read_text(encoding="utf-8")
    made.replace(place)
    for left in folder.iterdir():
        left.unlink()
    folder.rmdir()
    return parse_output(done.stdout + done.stderr, text)


def parse_output(printed: str, table: str) -> Compiled:
    """What Vela printed and the table that it wrote.

    >>> table = "cycles_total,sram_memory_used,off_chip_flash_memory_used,inference_time\\n7,1.5,2.5,0.25\\n"
    >>> printed = "Warning (supported operators) operator: EXP, ofm: 'y'\\nReason: no\\nNPU operators = 3\\n"
    >>> made = parse_output(printed, table)
    >>> made.on_the_cpu, made.operators, made.cycles, made.milliseconds
    ({'y': 'no'}, {'NPU': 3}, 7, 250.0)
    """
    reasons: dict[str, str] = {}
    counts: dict[str, int] = {}
    lines = printed.splitlines()
    for index, line in enumerate(lines):
        found = _ON_THE_CPU.match(line.strip())
        if found:
            following = lines[index + 1] if index + 1 < len(lines) else ""
            reasons[found[2]] = following.strip().removeprefix("Reason: ")
        counted = _COUNT.match(line.strip())
        if counted:
            counts[counted[1]] = int(counted[2])
    [row] = csv.DictReader(table.splitlines())
    return Compiled(
        on_the_cpu=reasons,
        operators=counts,
        cycles=int(float(row["cycles_total"])),
        sram_kib=float(row["sram_memory_used"]),
        flash_kib=float(row["off_chip_flash_memory_used"]),
        milliseconds=float(row["inference_time"]) * 1000,
    )
