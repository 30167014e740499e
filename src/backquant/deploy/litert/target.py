"""The target ``litert``: ``.tflite`` files, read back from LiteRT's interpreter and compared with the model.

Options: ``channels_last`` (inputs and outputs of four axes are stored with their channels last),
``integer_inputs`` and ``integer_outputs`` (int8 at the edges instead of floats).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import fx

from backquant.deploy.described_rounding import unstated_rounding
from backquant.deploy.exported import TargetKernel, Written
from backquant.deploy.job import ExportJob
from backquant.deploy.litert.flatbuffer import to_bytes
from backquant.deploy.litert.lowering import Lowered, Lowering, RefusedError
from backquant.deploy.litert.readback import LoadedFile, ReadOperator, read_back
from backquant.deploy.litert.rules import RULES, decomposed, unknown
from backquant.deploy.program import Program
from backquant.deploy.target import Requirement
from backquant.errors import ExportError
from backquant.lower.qdq import is_quantize, qparams_of
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode

__all__ = ["TARGET", "LiteRTTarget", "written_file"]

#: The options of how inputs and outputs are stored.
EDGES = ("channels_last", "integer_inputs", "integer_outputs")
#: What LiteRT's kernels have: XNNPACK's, those that round twice, those that round once.
_ARITHMETIC = (
    ("float", "half_even"),
    ("fixed_point_twice", "half_even"),
    ("fixed_point", "half_up"),
    ("float", "half_up"),
    ("float", "half_away"),
)
_DTYPES = (torch.int8, torch.int16)


class LiteRTTarget:
    """See the module; the attributes are those of ``backquant.deploy.Target``."""

    name = "litert"
    backend = "litert"
    suffixes = (".tflite",)
    extra = "litert"
    requires = (
        Requirement("ai-edge-litert", "ai_edge_litert", "2.0", "2.3"),
        Requirement("flatbuffers", "flatbuffers"),
    )
    options: tuple[str, ...] = EDGES

    def check(self, job: ExportJob) -> Sequence[Reason]:
        """Activations of other dtypes, and operators that the format has not."""
        stated = unstated_rounding(job, "LiteRT", arithmetic=_ARITHMETIC)
        return [*stated, *_wrong_dtypes(job.module), *_unknown(job)]

    def write(self, job: ExportJob, path: Path) -> Written:
        """Write, and read back."""
        lowered, content = written_file(job)
        path.write_bytes(content)
        found = read_back(content)
        return _report(job, lowered, found)

    def loaded(self, path: Path) -> LoadedFile:
        """See ``backquant.deploy.session``."""
        return LoadedFile(path.read_bytes())

    def exact(self, path: Path) -> LoadedFile:
        """See ``backquant.deploy.agreement``: without XNNPACK."""
        return LoadedFile(path.read_bytes(), delegates=False)


def written_file(job: ExportJob) -> tuple[Lowered, bytes]:
    """The network of a job, and its bytes. Raises ``ExportError`` for what the format cannot express."""
    program = decomposed(job.program)
    last, integer_inputs, integer_outputs = (bool(job.options.get(name)) for name in EDGES)
    lowering = Lowering(program, RULES, last, integer_inputs, integer_outputs)
    try:
        lowered = lowering.run()
    except RefusedError as error:
        raise _refused(job, program, error) from error
    return lowered, to_bytes(lowered.network, channels_last=last)


def _refused(job: ExportJob, program: Program, error: RefusedError) -> ExportError:
    origin = program.origins.get(error.node.name, error.node.name)
    decision = job.plan.decisions.get(origin)
    place = decision.module_path if decision is not None and decision.module_path else origin
    return ExportError(
        f"LiteRT has no counterpart for {error.node.target}: {error}",
        where=place,
        fix="write that part with other operators, or keep it outside of the exported model",
    )


def _report(job: ExportJob, lowered: Lowered, found: Sequence[ReadOperator]) -> Written:
    kernels = []
    for operation, read in zip(lowered.network.operations, found, strict=True):
        nodes = (operation.node,) if operation.node else ()
        name = f"{read.code}{' (XNNPACK)' if read.delegated else ''}"
        kernels.append(TargetKernel(name, nodes, read.dtype, integer=read.is_integer))
    runtime = f"ai-edge-litert {metadata.version('ai-edge-litert')}"
    return Written(runtime, tuple(kernels), undelegated=tuple(_transposes(job, lowered)))


def _transposes(job: ExportJob, lowered: Lowered) -> Iterator[Reason]:
    for node in lowered.transposes:
        decision = job.plan.decisions.get(node)
        yield Reason(
            node or "output",
            ReasonCode.NOT_DELEGATED,
            asked="no transpose inside",
            admitted="values are moved to another layout",
            place="" if decision is None else decision.module_path,
        )


def _wrong_dtypes(module: fx.GraphModule) -> Iterator[Reason]:
    for node in module.graph.nodes:
        if is_quantize(node) and qparams_of(node).dtype not in _DTYPES:
            yield Reason(
                node.name,
                ReasonCode.DTYPE,
                asked=f"activations {str(qparams_of(node).dtype).removeprefix('torch.')}",
                admitted="LiteRT computes with int8 or int16",
                fix='backquant.quantize(model, ..., backend="litert")',
            )


def _unknown(job: ExportJob) -> Iterator[Reason]:
    program = decomposed(job.program)
    for node in unknown(program):
        yield Reason(
            program.origins.get(node.name, node.name),
            ReasonCode.NO_KERNEL,
            asked=_name(node.target),
            admitted="LiteRT has no operator for it, nor for what it is computed with",
            fix="write it with other operators, or keep it outside of the exported model",
        )


def _name(target: Any) -> str:
    return str(target).removeprefix("torch.ops.")


TARGET = LiteRTTarget()
