"""Which engine a description is tried on."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from backquant.backend_config import BackendConfig
from backquant.conformance.by_rules import NONE, Rules, written_for
from backquant.conformance.compiled_engine import COMPILED, CompiledEngine
from backquant.conformance.seam import ConformanceEngine
from backquant.conformance.target_engines import TargetEngine
from backquant.conformance.torch_engines import TorchEngine
from backquant.conformance.tosa.engine import ACCELERATORS, TOSA, TosaEngine
from backquant.deploy.session import LoadingTarget
from backquant.deploy.target import find_target, list_targets, usual_suffix
from backquant.errors import EngineError, did_you_mean
from backquant.lower import list_engines


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
        fix="see backquant.conformance.seam.ConformanceEngine",
    )
