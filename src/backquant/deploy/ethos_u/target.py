"""The target ``ethos-u``.

Writes what ``litert`` writes, with integers at the edges, and compiles it by Vela where that is
installed: beside ``net.tflite`` lies ``net_vela.tflite``. An operator that the description admits and
that Vela leaves to the CPU is one that does not run as planned, and is listed with Vela's reason.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from backquant.deploy.ethos_u.vela import ACCELERATORS, Compiled, compile_file
from backquant.deploy.exported import TargetKernel, Written
from backquant.deploy.job import ExportJob
from backquant.deploy.litert.network import Network, Operation
from backquant.deploy.litert.target import LiteRTTarget, written_file
from backquant.errors import UsageError, did_you_mean
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode

__all__ = ["TARGET", "EthosUTarget"]

_VELA = ("config", "system_config", "memory_mode", "optimise")
_EDGES = {"integer_inputs": True, "integer_outputs": True, "channels_last": False}
_CONVERSIONS = ("QUANTIZE", "DEQUANTIZE")


class EthosUTarget(LiteRTTarget):
    """Options: those of ``litert``, ``accelerator`` (``"ethos-u55-128"``), and Vela's ``config``,
    ``system_config``, ``memory_mode`` and ``optimise``."""

    name = "ethos-u"
    extra = "ethos-u"
    options = (*_EDGES, "accelerator", *_VELA)

    def write(self, job: ExportJob, path: Path) -> Written:
        """Write the file, and compile it."""
        accelerator = _accelerator(job)
        edges = {name: job.options.get(name, value) for name, value in _EDGES.items()}
        job = replace(job, options=edges | {k: v for k, v in job.options.items() if k in _VELA})
        lowered, content = written_file(job)
        path.write_bytes(content)
        if importlib.util.find_spec("ethosu") is None:
            kernels = tuple(_kernel(each, "", "") for each in lowered.network.operations)
            return Written(f"{accelerator}, not compiled: ethos-u-vela is not installed", kernels)
        flags = {k.replace("_", "-"): str(v) for k, v in job.options.items() if k in _VELA}
        place = path.with_name(f"{path.stem}_vela.tflite")
        compiled = compile_file(path, place, accelerator, flags)
        runtime = f"{accelerator}, Vela {metadata.version('ethos-u-vela')}"
        return _report(job, lowered.network, compiled, runtime)


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
        decision = job.plan.decisions.get(operation.node)
        yield Reason(
            operation.node,
            ReasonCode.NOT_DELEGATED,
            asked=f"{operation.code}, which {job.config.name} admits"
            if operation.outputs[0].is_integer
            else f"{operation.code} in float",
            admitted=f"Vela: {reason}",
            place="" if decision is None else decision.module_path,
        )


TARGET = EthosUTarget()
