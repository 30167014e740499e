"""The target ``ethos-u``.

Writes what ``litert`` writes, with integers at the edges, and compiles it by Vela where that is
installed: beside ``net.tflite`` lies ``net_vela.tflite``. An operator that the description admits and
that Vela leaves to the CPU is one that does not run as planned, and is listed with Vela's reason.
"""

from __future__ import annotations

import csv
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from backquant.convert import IntegerEdges
from backquant.deploy.exported import TargetKernel, Written
from backquant.deploy.job import ExportJob
from backquant.deploy.litert.network import Network, Operation
from backquant.deploy.litert.target import LiteRTTarget, written_file
from backquant.errors import ExportError, UsageError, did_you_mean
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode

# Arm's Vela: runs it on a file, and reads what it says.
#
# It prints the operators that it leaves to the CPU with the reason, names them by the tensor that they
# write, and leaves a table of figures beside the compiled file.

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


_VELA = ("config", "system_config", "memory_mode", "optimise")
_CONVERSIONS = ("QUANTIZE", "DEQUANTIZE")


class EthosUTarget(LiteRTTarget):
    """Inputs and outputs are integers where they are quantized, unless ``integer_io`` says otherwise.

    Options: those of ``litert``, ``accelerator`` (``"ethos-u55-128"``), and Vela's ``config``,
    ``system_config``, ``memory_mode`` and ``optimise``."""

    name = "ethos-u"
    extra = "ethos-u"
    options = (*LiteRTTarget.options, "accelerator", *_VELA)
    edges = IntegerEdges(is_custom=True)

    def write(self, job: ExportJob, path: Path) -> Written:
        """Write the file, and compile it."""
        accelerator = _accelerator(job)
        network, content = written_file(job)
        path.write_bytes(content)
        if importlib.util.find_spec("ethosu") is None:
            kernels = tuple(_kernel(each, "", "") for each in network.operations)
            return Written(f"{accelerator}, not compiled: ethos-u-vela is not installed", kernels)
        flags = {k.replace("_", "-"): str(v) for k, v in job.options.items() if k in _VELA}
        place = path.with_name(f"{path.stem}_vela.tflite")
        compiled = compile_file(path, place, accelerator, flags)
        runtime = f"{accelerator}, Vela {metadata.version('ethos-u-vela')}"
        return _report(job, network, compiled, runtime)


def _accelerator(job: ExportJob) -> str:
    chosen = str(job.options.get("accelerator", "ethos-u55-128"))
    if chosen not in ACCELERATORS:
        meant = did_you_mean(chosen, ACCELERATORS)
        raise UsageError(
            f"there is no accelerator {chosen!r}" + (f" ({meant})" if meant else ""),
            where="options['accelerator']",
            fix=f"one of {', '.join(ACCELERATORS)}",
        )
    return chosen


def _report(job: ExportJob, network: Network, compiled: Compiled, runtime: str) -> Written:
    kernels = []
    for operation in network.operations:
        reason = compiled.on_the_cpu.get(operation.outputs[0].name, "")
        kernels.append(_kernel(operation, " on the CPU" if reason else " on the NPU", reason))
    figures = {
        "operators on the NPU": compiled.operators.get("NPU", 0),
        "operators on the CPU": compiled.operators.get("CPU", 0),
        "cycles": compiled.cycles,
        "milliseconds, estimated": round(compiled.milliseconds, 3),
        "SRAM, KiB": round(compiled.sram_kib, 1),
        "flash, KiB": round(compiled.flash_kib, 1),
    }
    left = tuple(_left(job, network, compiled))
    return Written(runtime, tuple(kernels), left, left, means="on the NPU", figures=figures)


def _kernel(operation: Operation, place: str, reason: str) -> TargetKernel:
    nodes = (operation.node,) if operation.node else ()
    output = operation.outputs[0]
    integer = output.is_integer and not reason
    return TargetKernel(f"{operation.code}{place}", nodes, output.dtype.lower(), integer=integer)


def _left(job: ExportJob, network: Network, compiled: Compiled) -> Iterator[Reason]:
    """Operators on integers that Vela leaves to the CPU."""
    for operation in network.operations:
        reason = compiled.on_the_cpu.get(operation.outputs[0].name)
        if reason is None or operation.code in _CONVERSIONS or not operation.node:
            continue
        yield Reason(
            operation.node,
            ReasonCode.NOT_DELEGATED,
            asked=f"{operation.code}, which {job.config.name} admits"
            if operation.outputs[0].is_integer
            else f"{operation.code} in float",
            admitted=f"Vela: {reason}",
            place=job.place_of(operation.node),
        )


TARGET = EthosUTarget()
