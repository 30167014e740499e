"""Which engine a description is tried on."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from backquant.backend_config import BackendConfig
from backquant.conformance.engine_protocol import (
    Answer,
    Build,
    ConformanceEngine,
    NotAskedError,
    Ran,
    RefusedByEngineError,
)
from backquant.conformance.rounded_once import BuildsTogether
from backquant.conformance.target_engines import TargetEngine, joined_graphs
from backquant.conformance.torch_engines import REFERENCE, BuiltHere, TorchEngine, said
from backquant.conformance.tosa.engine import ACCELERATORS, TOSA, TosaEngine
from backquant.convert import convert_to_reference
from backquant.deploy import run_export
from backquant.deploy.exported import Exported
from backquant.deploy.job_of import export_job
from backquant.deploy.session import LoadingTarget
from backquant.deploy.target import Target, find_target, list_targets, usual_suffix
from backquant.errors import BackquantError, EngineError, did_you_mean
from backquant.graph.silence import without_warnings
from backquant.lower import list_engines
from backquant.pipeline.lower import quantized_model
from backquant.runtime.compiled.modules import compilable
from backquant.runtime.compiled.program import CompiledProgram, compile_graph
from backquant.version import __version__


def find_conformance_engine(
    backend: BackendConfig, engine: ConformanceEngine | str | None
) -> ConformanceEngine:
    """``engine`` itself, or the one of that name; ``None``: the one that the description names, else the
    runtime of the target that the description is for, else no engine, but the plan and the target's rules.

    ``mypkg.module:NAME`` is imported; ``mypkg`` is ``mypkg:ENGINE``. Raises ``EngineError``.

    >>> from backquant.backend_config import get_backend_config
    >>> find_conformance_engine(get_backend_config("native"), None).name
    'fbgemm'
    >>> find_conformance_engine(get_backend_config("xnnpack"), None).name
    'xnnpack'
    >>> find_conformance_engine(get_backend_config("tensorrt"), None).name
    'tensorrt'
    """
    if engine is None and backend.engine is None:
        if backend.name in ACCELERATORS:
            return TosaEngine(backend.name)
        return _target(backend.name) or Rules(written_for(backend.name))
    if engine is None:
        return TorchEngine(str(backend.engine))
    if not isinstance(engine, str):
        return _checked(engine, repr(engine))
    if ":" in engine:
        return _checked(imported(engine, "engine"), engine)
    if engine in list_engines():
        return TorchEngine(engine)
    if engine == TOSA or engine in ACCELERATORS:
        return TosaEngine(engine)
    if engine == COMPILED and backend.engine is not None:
        return CompiledEngine(backend.engine)
    target = _target(engine)
    if target is not None:
        return target
    if engine == NONE or written_for(engine) is not None:
        return Rules(written_for(engine))
    if engine.isidentifier() and importlib.util.find_spec(engine) is not None:
        return _checked(imported(f"{engine}:ENGINE", "engine"), f"{engine}:ENGINE")
    own = (*(found.name for found in _loading()), NONE)
    names = [*list_engines(), COMPILED, TOSA, *ACCELERATORS, *own]
    near = did_you_mean(engine, names, f"one of {', '.join(names)}, or mypkg.module:NAME")
    raise EngineError(f"there is no engine {engine!r} to try", where="engine", fix=near)


def _target(name: str) -> TargetEngine | None:
    """The target of that name, or for the backend of that name, if its runtime runs here."""
    for target in _loading():
        if name in (target.name, target.backend):
            return TargetEngine(target)
    return None


def _loading() -> list[LoadingTarget]:
    """The targets whose files can be run in this process."""
    found = (find_target(name, Path(f"model{usual_suffix(name)}")) for name in list_targets())
    return [target for target in found if isinstance(target, LoadingTarget)]


def imported(path: str, what: str) -> Any:
    """What ``mypkg.module:NAME`` names. Raises ``EngineError``.

    >>> imported("operator:add", "examples").__name__
    'add'
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise EngineError(
            f"{path!r} cannot be imported: {error}",
            where=what,
            fix="install its package; the path is module:NAME",
        ) from error


def _checked(found: object, where: str) -> ConformanceEngine:
    if isinstance(found, ConformanceEngine) and not isinstance(found, type):
        return found
    raise EngineError(
        "an engine to try has name, takes_sizes, versions() and build()",
        where=where,
        fix="see backquant.conformance.engine_protocol.ConformanceEngine",
    )


# Compiled code of lowered models (``QuantizedModel.compile``), many in one compilation: it takes seconds for
# the smallest of them.

COMPILED = "compiled"
_GROUP = 24


@dataclass(frozen=True)
class _Part:
    """A lowered model, its graph in the spelling that is compiled, and inputs of its sizes."""

    lowered: BuiltHere
    graph: fx.GraphModule
    example: tuple[Tensor, ...]


@dataclass(frozen=True)
class CompiledEngine(BuildsTogether[_Part]):
    """The kernels of ``engine``, compiled.

    >>> CompiledEngine("x86").name
    'compiled'
    """

    engine: str
    name: str = COMPILED
    takes_sizes: bool = False
    group: int = _GROUP

    def versions(self) -> dict[str, str]:
        return TorchEngine(self.engine).versions()

    def _ready(self, each: Build) -> _Part | BuiltHere:
        lowered = TorchEngine(self.engine).build(each.prepared, each.example)
        if lowered.ran.in_float:
            return lowered  # nothing of its own is compiled
        return _Part(lowered, compilable(lowered.model.graph_module), each.example)

    def _built(self, parts: Sequence[_Part]) -> list[Answer]:
        examples = [value for part in parts for value in part.example]
        program = compile_graph(
            joined_graphs([part.graph for part in parts]), tuple(examples), None, {}
        )
        made: list[Answer] = []
        first = 0
        for at, part in enumerate(parts):
            count = len(part.example)
            made.append(
                BuiltCode(
                    program, tuple(examples), slice(first, first + count), at, part.lowered.ran
                )
            )
            first += count
        return made


@dataclass(frozen=True)
class BuiltCode:
    """One of the models in a compiled program; the others get their examples when it is called."""

    program: CompiledProgram
    examples: tuple[Tensor, ...]
    own: slice
    at: int
    ran: Ran

    def run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        given = list(self.examples)
        given[self.own] = inputs
        try:
            with torch.no_grad():
                found: Tensor = self.program(tuple(given))[self.at]
        except (BackquantError, RuntimeError) as error:
            raise RefusedByEngineError(said(error)) from error
        return found


# Descriptions whose engine is not here: what can be said without it.
#
# What lies beyond a claim has to be refused by the plan, for that reason, as on any engine. What a claim
# admits is planned, and its reference model computes it; where ``export`` writes files for the chip
# (TensorRT), the file is written and judged by the documented rules. What these leave open is
# ``untried``, and says so.

#: The name of the engine of a description that neither an engine nor a target is for.
NONE = "none"


@dataclass(frozen=True)
class Rules:
    """Judges by the plan and, with ``target``, by the rules that files for it are checked by.

    >>> Rules().name, Rules(written_for("tensorrt_fp8")).name
    ('none', 'tensorrt')
    """

    target: Target | None = None
    takes_sizes: bool = False

    @property
    def name(self) -> str:
        return NONE if self.target is None else self.target.name

    def versions(self) -> dict[str, str]:
        found = {
            "backquant": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        needs = () if self.target is None else self.target.requires
        return found | {
            need.package: metadata.version(need.package) for need in needs if _here(need.module)
        }

    def build(self, prepared: fx.GraphModule, example: tuple[Tensor, ...]) -> LeftInFloat:
        """What stays float by the rules. Raises ``RefusedByEngineError`` where a rule is broken, and
        ``NotAskedError`` where nothing speaks against the model."""
        how = _computed(prepared, example)
        if self.target is None or not all(_here(need.module) for need in self.target.requires):
            raise NotAskedError(f"no engine of it is here; {how}")
        kernels, left = self._by_rules(prepared, example)
        if left.in_float:
            return LeftInFloat(left)
        raise NotAskedError(
            f"no {self.target.name} is here; by its rules it computes {kernels}; {how}"
        )

    def _by_rules(self, prepared: fx.GraphModule, example: tuple[Tensor, ...]) -> tuple[str, Ran]:
        assert self.target is not None
        try:
            exported = _exported(prepared, example, self.target)
        except (BackquantError, RuntimeError) as error:
            where = (str(getattr(error, "where", "")).splitlines() or [""])[0]
            raise RefusedByEngineError(f"by its rules: {said(error)}: {where}"[:300]) from error
        named = dict.fromkeys(f"{use.kernel} ({use.dtype})" for use in exported.kernels)
        return ", ".join(named), Ran(tuple(named), exported.left_in_float)


@dataclass(frozen=True)
class LeftInFloat:
    """What is written in part for floats: an outcome by itself, so that nobody runs it."""

    ran: Ran

    def run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        raise NotAskedError(f"there is no engine to run it on {len(inputs)} inputs")


def written_for(backend: str) -> Target | None:
    """The target that writes files for a description of this name, and has no runtime in this process.

    >>> written_for("tensorrt").name, written_for("my_npu")
    ('tensorrt', None)
    """
    for name in list_targets():
        target = find_target(name, Path(f"model{usual_suffix(name)}"))
        own = backend == target.backend or backend.startswith(f"{target.backend}_")
        if own and not isinstance(target, LoadingTarget):
            return target
    return None


def _here(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _computed(prepared: fx.GraphModule, example: tuple[Tensor, ...]) -> str:
    """The reference model computes it: on integers, where the integer reference has its arithmetic."""
    reference = convert_to_reference(prepared)
    with torch.no_grad():
        reference(*example)
        try:
            integers = quantized_model(convert_to_reference(prepared), prepared, REFERENCE)
            integers(*example)
        except (BackquantError, RuntimeError):
            return "its reference model computes it, in float"
    if integers.left_in_float:
        return "its reference model computes it, in float"
    names = dict.fromkeys(use.kernel for use in integers.kernels)
    return f"the integer reference computes it ({', '.join(names)})"


def _exported(prepared: fx.GraphModule, example: tuple[Tensor, ...], target: Target) -> Exported:
    with tempfile.TemporaryDirectory() as folder, without_warnings(UserWarning):
        job = export_job(convert_to_reference(prepared), target, example)
        return run_export(job, target, Path(folder) / f"model{target.suffixes[0]}", 0.0)
