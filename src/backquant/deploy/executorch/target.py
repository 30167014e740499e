"""ExecuTorch: ``.pte`` programs whose operators run in the XNNPACK delegate.

Before anything is written: operators without a kernel, activations of a dtype that XNNPACK lacks, and
axes without a bound are named. Afterwards the file is read back, loaded in ExecuTorch's runtime and run
on the example inputs; a result far from the reference model's is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from backquant.deploy.described_rounding import unstated_rounding
from backquant.deploy.executorch.called_once import called_once
from backquant.deploy.executorch.lowering import lower_program
from backquant.deploy.executorch.readback import read_back
from backquant.deploy.executorch.runtime import ExecuTorchModel, LoadedProgram, registered_kernels
from backquant.deploy.exported import TargetKernel, Written
from backquant.deploy.job import ExportJob
from backquant.deploy.roundings import computed, dithered, float_tensors, ratio
from backquant.deploy.target import Requirement
from backquant.errors import ExportError, literal
from backquant.lower.qdq import is_quantize, qparams_of
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode

# Rounding in another order moves values by steps; a wrong operator moves them by their own size.
_LEAST_SQNR = 3.0  # dB
_MORE = 3.0  # dB: twice the noise that roundings make is no rounding
_KNOWN_NAMESPACES = ("aten", "quantized_decomposed", "prims", "dim_order_ops", "backquant")


class ExecuTorchTarget:
    """See the module; the attributes are those of ``backquant.deploy.Target``."""

    name = "executorch"
    backend = "xnnpack"
    suffixes = (".pte",)
    extra = "executorch"
    requires = (Requirement("executorch", "executorch", "1.5", "1.5"),)
    options: tuple[str, ...] = ()

    def check(self, job: ExportJob) -> Sequence[Reason]:
        """Operators without a kernel, activations that are not int8, axes without a bound."""
        unstated = unstated_rounding(job, "XNNPACK")
        return [*unstated, *_wrong_dtypes(job.module), *_unbounded(job), *_unknown(job)]

    def write(self, job: ExportJob, path: Path) -> Written:
        """Lower, write, read back, run."""
        module = called_once(job.module)
        if module is not job.module:  # the program of ``job`` is made by now
            job = replace(job, module=module)
        lowered = lower_program(job.program)
        path.write_bytes(lowered.buffer)
        found = read_back(lowered.buffer)
        _check_kernels(found.portable)
        _run(job, lowered.buffer)
        kernels = [
            TargetKernel(f"XNNPACK {node.kind}", nodes, node.dtype, integer=node.is_integer)
            for delegate in found.delegates
            for node in delegate
            for nodes in [_named(lowered.origins.get(node.debug_handle, ""))]
        ]
        kernels += [TargetKernel(name, (), "float32", integer=False) for name in found.portable]
        left = [_undelegated(node, reason) for node, reason in lowered.refused.items()]
        in_float = [
            Reason(node, ReasonCode.DYNAMIC_SHAPE, "a kernel on integers", admitted=reason)
            for node, reason in lowered.in_float.items()
        ]
        runtime = f"executorch {metadata.version('executorch')}"
        return Written(runtime, tuple(kernels), (*left, *in_float), undelegated=tuple(left))

    def loaded(self, path: Path) -> LoadedProgram:
        """See ``backquant.deploy.session``."""
        return LoadedProgram(path)


def _undelegated(node: str, reason: str) -> Reason:
    return Reason(
        node,
        ReasonCode.NOT_DELEGATED,
        asked="an operator of the XNNPACK delegate",
        admitted=reason,
        place="ExecuTorch's XNNPACK partitioner",
    )


def _named(node: str) -> tuple[str, ...]:
    return (node,) if node else ()


def _wrong_dtypes(module: fx.GraphModule) -> Iterator[Reason]:
    for node in module.graph.nodes:
        if is_quantize(node) and qparams_of(node).dtype is not torch.int8:
            yield Reason(
                node.name,
                ReasonCode.DTYPE,
                asked=f"activations {str(qparams_of(node).dtype).removeprefix('torch.')}",
                admitted="XNNPACK computes with int8",
                fix='backquant.quantize(model, ..., backend="xnnpack")',
            )


def _unbounded(job: ExportJob) -> Iterator[Reason]:
    """ExecuTorch plans its memory ahead: every axis needs an upper bound."""
    ranges = job.program.exported.range_constraints
    open_ended = {str(s) for s, bounds in ranges.items() if not bounds.upper.is_Integer}
    for node in job.program.exported.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        sizes: list[Any] = list(value.shape)
        for axis, size in enumerate(sizes):
            if not isinstance(size, int) and str(size) in open_ended:
                yield Reason(
                    node.name,
                    ReasonCode.DYNAMIC_SHAPE,
                    asked=f"axis {axis} of any size",
                    admitted="ExecuTorch plans its memory ahead: an upper bound for every axis",
                    fix=f'dynamic_shapes={{{literal(node.name)}: {{{axis}: "size<=64"}}}}',
                )


def _unknown(job: ExportJob) -> Iterator[Reason]:
    """Operators that neither decompose nor have a kernel in this build of ExecuTorch."""
    for node in job.program.exported.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target.namespace not in _KNOWN_NAMESPACES:
            yield Reason(
                job.program.origins.get(node.name, node.name),
                ReasonCode.NO_KERNEL,
                asked=str(node.target),
                admitted="operators of aten: ExecuTorch has no kernel for this one",
                fix="write it with operators of torch, or leave it out of the exported model",
            )


def _check_kernels(portable: Sequence[str]) -> None:
    """Raise ``ExportError`` for operators outside of the delegates that this build has no kernel for."""
    known = registered_kernels()  # some without an overload: "aten::copy_"
    used = {name for name in portable if name.rpartition(".")[0] not in known}
    missing = sorted(used - known)
    if missing:
        raise ExportError(
            f"ExecuTorch has no kernel for {', '.join(missing)}",
            where=f"executorch {metadata.version('executorch')}, outside of the delegates",
            fix="write that part of the model with other operators, or keep it outside of the exported model",
        )


def _run(job: ExportJob, program: bytes) -> None:
    """Raise ``ExportError`` when the runtime refuses the program, or computes something else."""
    made = pytree.tree_leaves(ExecuTorchModel(program)(*job.args, **job.kwargs))
    places = [i for i, one in enumerate(made) if float_tensors(one)]
    expected = computed(job)
    for place, (output, one) in enumerate(zip(places, expected, strict=True)):
        other = made[output]
        known = one.isfinite()
        if not known.any():
            raise ExportError(
                f"the reference model gives no number in output {output}, on the example inputs",
                where="export",
                fix="backquant.export(..., example_inputs=one_batch_of_real_inputs)",
            )
        near = ratio([one[known]], [other[known]])
        if near >= _LEAST_SQNR:
            continue
        rounding = ratio([one[known]], [dithered(job)[place][known]])
        if near < rounding - _MORE:
            raise ExportError(
                f"ExecuTorch's runtime computes something else than the reference model: output "
                f"{output} differs with an SQNR of {near:.1f} dB, where noise of half a step at every "
                f"rounding leaves {rounding:.1f} dB",
                where=f"executorch {metadata.version('executorch')}, on the example inputs",
                fix="leave parts out of the quantization until it agrees, and report it to ExecuTorch",
            )


TARGET = ExecuTorchTarget()
