"""TOSA's reference model as an engine; for an Ethos-U, Vela is asked first whether it compiles each kernel.

Each kernel of the integer reference model is written as TOSA operators (``translate``), and computed by
TOSA's reference model (``pip install tosa-tools``) from the integers that it reads. What only moves values
moves them here. A kernel that has no TOSA form here is not asked about (``NotAskedError``).
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from backquant.conformance.seam import NotAskedError, Ran, RefusedByEngineError
from backquant.conformance.torch_engines import REFERENCE, said, single
from backquant.conformance.tosa.graph import TosaError, binary, run
from backquant.conformance.tosa.translate import NoTosaError, in_our_order, translated
from backquant.conformance.tosa.vela import compiled
from backquant.convert import convert_to_reference
from backquant.errors import BackquantError, EngineError
from backquant.lower.kernels.integer.result import IntegerKernel
from backquant.pipeline.lower import quantized_model
from backquant.version import __version__

PROGRAM = "tosa_reference_model"
#: By the name of a description: the accelerator that Vela is asked for.
ACCELERATORS = {"ethos_u55": "EthosU55", "ethos_u65": "EthosU65", "ethos_u85": "EthosU85"}
TOSA = "tosa"


@dataclass(frozen=True)
class TosaEngine:
    """``name``: ``tosa``, or one of ``ACCELERATORS``, which Vela has to compile each kernel for.

    >>> TosaEngine("ethos_u55").takes_sizes
    False
    """

    name: str = TOSA
    takes_sizes: bool = False

    def versions(self) -> dict[str, str]:
        found = {
            "backquant": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        needed = ["tosa-tools", *(["ethos-u-vela"] if self.name in ACCELERATORS else [])]
        modules = {"ethos-u-vela": "ethosu"}
        for package in needed:
            module = modules.get(package)
            here = importlib.util.find_spec(module) if module else _program()
            if here is None:
                raise EngineError(
                    f"{package} is not installed beside this Python",
                    where=f"engine={self.name!r}",
                    fix=f"pip install {' '.join(needed)}",
                )
            found[package] = metadata.version(package)
        return found

    def build(self, prepared: fx.GraphModule, example: tuple[Tensor, ...]) -> BuiltTosa:
        try:
            model = quantized_model(convert_to_reference(prepared), prepared, REFERENCE)
        except (BackquantError, RuntimeError) as error:
            raise RefusedByEngineError(said(error)) from error
        program = _program()
        assert program is not None
        asked = _Kernels(model.graph_module, program, ACCELERATORS.get(self.name, ""))
        with torch.no_grad():
            asked.run(*example)
        if not asked.names:
            raise NotAskedError("nothing of it is computed by a kernel of the integer reference")
        return BuiltTosa(model.graph_module, program, tuple(asked.names), model.left_in_float)


@dataclass(frozen=True)
class BuiltTosa:
    """A model of integer kernels, each of which TOSA's reference model computes."""

    module: fx.GraphModule
    program: Path
    names: tuple[str, ...]
    left: tuple[Any, ...] = field(default=())

    @property
    def ran(self) -> Ran:
        return Ran(self.names, self.left)

    def run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        with torch.no_grad():
            return single(_Kernels(self.module, self.program, "", compute=True).run(*inputs))


class _Kernels(fx.Interpreter):
    """Runs a model. Of each kernel on integers it asks Vela (``accelerator``), or lets TOSA compute it."""

    def __init__(
        self, module: fx.GraphModule, program: Path, accelerator: str, *, compute: bool = False
    ) -> None:
        super().__init__(module)
        self.extra_traceback = False  # messages are shown as they are
        self.program, self.accelerator, self.compute = program, accelerator, compute
        self.names: list[str] = []

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = super().call_module(target, args, kwargs)
        kernel = self.fetch_attr(target)
        if not isinstance(kernel, IntegerKernel):
            return out
        inputs = tuple(args[0] if isinstance(args[0], (list, tuple)) else args)
        if any(each.dtype != torch.int8 for each in (*inputs, out) if isinstance(each, Tensor)):
            raise NotAskedError(f"{kernel.kernel}: TOSA files are written of 8-bit integers here")
        try:
            graph, output = translated(kernel, inputs, out)
        except NoTosaError as error:
            raise NotAskedError(f"{kernel.kernel} is not written as TOSA: {error}") from error
        self.names.append(graph.written())
        with tempfile.TemporaryDirectory() as folder:
            if self.compute:
                return self._computed(graph, output, Path(folder), out, kernel)
            if self.accelerator:
                self._asked(graph, output, Path(folder))
        return out

    def _computed(
        self, graph: Any, output: str, folder: Path, out: Tensor, kernel: IntegerKernel
    ) -> Tensor:
        try:
            found = run(graph, output, self.program, folder)
        except TosaError as error:
            raise RefusedByEngineError(f"TOSA's reference model: {error}"[:300]) from error
        return torch.as_tensor(in_our_order(found, out, kernel).copy()).to(out.dtype)

    def _asked(self, graph: Any, output: str, folder: Path) -> None:
        try:
            compiled(binary(graph, output, self.program, folder), "TOSA", self.accelerator)
        except (TosaError, RuntimeError) as error:
            raise RefusedByEngineError(f"Vela: {error}"[:300]) from error


def _program() -> Path | None:
    """TOSA's reference model, which is installed beside this Python."""
    beside = Path(sys.prefix) / "bin" / PROGRAM
    found = str(beside) if beside.exists() else shutil.which(PROGRAM)
    return None if found is None else Path(found)
