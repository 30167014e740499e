"""AOTInductor: ``.pt2`` packages of compiled code, which run without tracing.

Needs a C++ compiler where they are built. Weights and constants are frozen into the package: only then
are oneDNN's kernels chosen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from backquant.deploy.exported import Written
from backquant.deploy.inductor.fusible import made_fusible
from backquant.deploy.inductor.readback import check_numbers, kernels_of
from backquant.deploy.inductor.workarounds import (
    hold_zero,
    keep_ceil_mode,
    keep_transposed,
    number_paddings,
    split_dequantize,
    with_height,
    with_two_channels,
)
from backquant.deploy.job import ExpectedOperator, ExportJob
from backquant.deploy.program import decomposed_for_runtimes, export_program
from backquant.deploy.roundings import unstated_rounding
from backquant.deploy.session import row_major
from backquant.deploy.target import Requirement
from backquant.errors import ExportError, first_line
from backquant.graph.grouped import grouped_linear
from backquant.graph.silence import quiet
from backquant.match.plan import Reason
from backquant.operators.aten import cut_windows
from backquant.reason_codes import ReasonCode
from backquant.runtime.compiled.inductor import check_compiler

__all__ = ["TARGET", "InductorTarget"]


class InductorTarget:
    """See the module; the attributes are those of ``backquant.deploy.Target``.

    ``options``: what ``torch._inductor.config`` knows, under its own names.
    """

    name = "inductor"
    backend = "inductor_x86"
    suffixes = (".pt2",)
    extra = "inductor"
    requires = (Requirement("torch", "torch", "2.13", "2.13"),)
    options = ("inductor_configs",)

    def check(self, job: ExportJob) -> Sequence[Reason]:
        """A compiler; what has no kernel is generated, but for roundings that PyTorch has no operator for."""
        check_compiler()
        return list(unstated_rounding(job, "PyTorch"))

    def write(self, job: ExportJob, path: Path) -> Written:
        """Compile, package, run on the example inputs, and read the kernels back."""
        module = split_dequantize(job.module)
        program = export_program(module, job.args, dict(job.kwargs), job.dynamic_shapes)
        if grouped_linear in {node.target for node in program.exported.graph.nodes}:
            program = decomposed_for_runtimes(program)
        cut_windows(program.exported.graph)
        keep_ceil_mode(program)
        number_paddings(program)
        hold_zero(program)
        with_height(program)
        with_two_channels(program)
        keep_transposed(program)
        program = made_fusible(program)
        configs = {"freezing": True, **job.options.get("inductor_configs", {})}
        try:
            with quiet(), torch.no_grad():
                torch._inductor.aoti_compile_and_package(
                    program.exported, package_path=str(path), inductor_configs=configs
                )
        except Exception as error:
            raise ExportError(
                f"AOTInductor cannot compile the model: {first_line(error)}",
                where=f"torch {torch.__version__}",
                fix="the exception above has the compiler's own words",
            ) from error
        check_numbers(job, path)
        kernels = tuple(kernels_of(path, module, program))
        left = tuple(
            _generated(operator) for operator in job.expected if not operator.multiply_adds
        )
        return Written(f"AOTInductor of torch {torch.__version__.split('+')[0]}", kernels, left)

    def loaded(self, path: Path) -> LoadedPackage:
        """See ``backquant.deploy.session``."""
        return LoadedPackage(path)


class LoadedPackage:
    """See ``backquant.deploy.session.Loaded``."""

    def __init__(self, path: Path) -> None:
        self._run = torch._inductor.aoti_load_package(str(path))
        self.inputs: Mapping[str, Sequence[int | None]] = {}  # a package has no names of them

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """One call."""
        with torch.no_grad():
            found = self._run(*(row_major(torch.as_tensor(value)) for value in inputs))
        return [value.numpy() for value in pytree.tree_leaves(found)]


def _generated(operator: ExpectedOperator) -> Reason:
    return Reason(
        operator.node,
        ReasonCode.GENERATED,
        asked=f"{operator.operator} on integers",
        admitted="generated code, which reads and writes integers",
        place=operator.module_path,
    )


TARGET = InductorTarget()
