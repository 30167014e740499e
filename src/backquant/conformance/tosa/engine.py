"""TOSA's reference model as an engine; for an Ethos-U, Vela is asked first whether it compiles each kernel.

Each kernel of the integer reference model is written as TOSA operators (``translate``), and computed by
TOSA's reference model (``pip install tosa-tools``) from the integers that it reads, and so is what moves
integers. A kernel that has no TOSA form here is not asked about (``NotAskedError``).
"""

from __future__ import annotations

import importlib.util
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from backquant.conformance.engine_protocol import NotAskedError, Ran, RefusedByEngineError
from backquant.conformance.torch_engines import REFERENCE, said, single
from backquant.conformance.tosa.moves import Graph, Move, NoTosaError, TosaError, binary, run
from backquant.conformance.tosa.translate import (
    in_our_order,
    translated,
    translated_move,
    translated_nearest,
    translated_rescale,
)
from backquant.convert import convert_to_reference
from backquant.errors import BackquantError, EngineError
from backquant.lower.kernels.integer.lookup_tables import rescale
from backquant.lower.kernels.integer.resize import nearest
from backquant.lower.kernels.integer.result import IntegerKernel
from backquant.pipeline.lower import quantized_model
from backquant.version import __version__

PROGRAM = "tosa_reference_model"
#: By the name of a description: the accelerator that Vela is asked for.
ACCELERATORS = {"ethos_u55": "EthosU55", "ethos_u65": "EthosU65", "ethos_u85": "EthosU85"}
TOSA = "tosa"
_WITHOUT_SOME = ("EthosU55", "EthosU65")
_INTEGERS = (torch.int8, torch.int16)


def _of_tflite_alone(graph: Graph) -> str:
    """What Vela 5.2.0 does not take of TOSA files for these accelerators, though it does of TFLite files."""
    if any(each["attribute"].get("mode") == "BILINEAR" for each in graph.operators):
        return "bilinear RESIZE"
    is_transposed = any(each["op"] == "TRANSPOSE_CONV2D" for each in graph.operators)
    of_16_bits = any(value.dtype.name == "int16" for value in graph.inputs.values())
    return "transposed convolutions of 16 bits" if is_transposed and of_16_bits else ""


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
    """Runs a model. Of each kernel and each move of integers it asks Vela (``accelerator``), or lets TOSA
    compute it."""

    def __init__(
        self, module: fx.GraphModule, program: Path, accelerator: str, *, compute: bool = False
    ) -> None:
        super().__init__(module)
        self.extra_traceback = False  # messages are shown as they are
        self.program, self.accelerator, self.compute = program, accelerator, compute
        self.names: list[str] = []

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernel = self.fetch_attr(target)
        if not isinstance(kernel, IntegerKernel):
            return self._moved(kernel, args, kwargs)
        out = super().call_module(target, args, kwargs)
        flat = args[0] if isinstance(args[0], (list, tuple)) else args
        inputs = tuple(each for each in flat if isinstance(each, Tensor))
        if any(each.dtype not in _INTEGERS for each in (*inputs, out)):
            raise NotAskedError(f"{kernel.kernel}: TOSA has no kernel from or to these dtypes")
        return self._done(kernel.kernel, lambda: translated(kernel, inputs, out), out, kernel)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._moved(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._moved(
            lambda x, *rest, **named: getattr(x, target)(*rest, **named), args, kwargs
        )

    def _moved(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is called on integers and gives integers of that dtype moves them. It may do so in place."""
        x = args[0].clone() if args and isinstance(args[0], Tensor) else None
        out = target(*args, **kwargs)
        if not isinstance(x, Tensor) or x.dtype not in _INTEGERS:
            return out
        if target is rescale:
            return self._done("rescale", lambda: translated_rescale(x, out, args[1:]), out, rescale)
        if isinstance(out, (tuple, list)):
            return type(out)(
                self._part(x, each, lambda t, at=at: target(t.clone(), *args[1:], **kwargs)[at])  # type: ignore[misc]
                for at, each in enumerate(out)
            )
        return self._part(
            x, out, lambda t: target(t.clone(), *args[1:], **kwargs), target is nearest
        )

    def _part(self, x: Tensor, out: Any, move: Move, interpolated: bool = False) -> Any:
        if not isinstance(out, Tensor) or out.dtype != x.dtype:
            return out
        if interpolated and x.dim() == 4:
            return self._done("nearest", lambda: translated_nearest(move, x), out, nearest)
        return self._done("move", lambda: translated_move(move, x), out, move)

    def _done(
        self, name: str, form: Callable[[], tuple[Graph, str]], out: Tensor, kernel: Any
    ) -> Any:
        """What TOSA makes of it; ``out`` itself, where nothing is to be computed."""
        try:
            graph, output = form()
        except NoTosaError as error:
            raise NotAskedError(f"{name} is not written as TOSA: {error}") from error
        self.names.append(graph.written())
        with tempfile.TemporaryDirectory() as folder:
            if self.compute:
                return self._computed(graph, output, Path(folder), out, kernel)
            if self.accelerator:
                self._asked(graph, output, Path(folder))
        return out

    def _computed(
        self, graph: Graph, output: str, folder: Path, out: Tensor, kernel: Any
    ) -> Tensor:
        try:
            found = run(graph, output, self.program, folder)
        except TosaError as error:
            raise RefusedByEngineError(f"TOSA's reference model: {error}"[:300]) from error
        return torch.as_tensor(in_our_order(found, out, kernel).copy()).to(out.dtype)

    def _asked(self, graph: Graph, output: str, folder: Path) -> None:
        refused = _of_tflite_alone(graph) if self.accelerator in _WITHOUT_SOME else ""
        if refused:
            raise NotAskedError(
                f"Vela takes {refused} for {self.accelerator} of TFLite files, and of TOSA files not"
            )
        try:
            compiled(binary(graph, output, self.program, folder), "TOSA", self.accelerator)
        except (TosaError, RuntimeError) as error:
            raise RefusedByEngineError(f"Vela: {error}"[:300]) from error


def _program() -> Path | None:
    """TOSA's reference model, which is installed beside this Python."""
    beside = Path(sys.prefix) / "bin" / PROGRAM
    found = str(beside) if beside.exists() else shutil.which(PROGRAM)
    return None if found is None else Path(found)


# Whether Arm's Vela compiles a file for an Ethos-U (``pip install ethos-u-vela``).

#: Multiply-adds per cycle, system and memory of Vela's own configuration file.
_SYSTEMS = {
    "EthosU55": (128, "Ethos_U55_High_End_Embedded", "Shared_Sram"),
    "EthosU65": (256, "Ethos_U65_High_End", "Dedicated_Sram"),
    "EthosU85": (256, "Ethos_U85_SYS_DRAM_Mid", "Dedicated_Sram"),
}


@lru_cache
def _system(accelerator: str) -> str:
    import ethosu

    path = Path(next(iter(ethosu.__path__))) / "config_files" / "Arm" / "vela.ini"
    macs, system, memory = _SYSTEMS[accelerator]
    return (
        f"[architecture]\nmacs={macs}\ncores=1\n"
        f"[vela]\nsystem_config_name={system}\nmemory_mode_name={memory}\n"
        + path.read_text(encoding="utf-8")
    )


_OPTIONS = """
[compiler]
output_format=TFLite
cop_format=COP1

[scheduler]
optimize=Size
disable_feature=
cpu_tensor_alignment=16
tensor_allocator=HillClimb

[graph]
"""


def compiled(file: bytes, kind: str, accelerator: str) -> Any:
    """What Vela makes of a file (``kind``: TFLITE or TOSA) for EthosU55, EthosU65 or EthosU85.

    Raises ``RuntimeError`` with what it says, where it does not take it.
    """
    from ethosu import regor

    system = _system(accelerator)
    return regor.compile(accelerator, file, kind, system, options=_OPTIONS, verbose=False)
