"""``BACKEND`` on the command line: a name or a file."""

from __future__ import annotations

from collections.abc import Sequence

from backquant.backend_config import BackendConfig, get_backend_config
from backquant.backend_config.registry import is_spec_file
from backquant.backend_config.validate import Finding, Severity
from backquant.errors import EngineError


def load_backend(backend: str, allow: Sequence[str] | None = None) -> BackendConfig:
    """The description that ``BACKEND`` names; ``allow``: packages that a file may name classes from.

    >>> load_backend("x86").name
    'x86'
    """
    if is_spec_file(backend):
        return BackendConfig.load(backend, allow=tuple(allow or ()))
    return get_backend_config(backend)


def findings(backend: str, allow: Sequence[str] | None = None) -> list[Finding]:
    """Everything there is to say about a description, what only its engine knows included.

    Raises ``SpecError`` when there is no such file, ``UnknownBackendError`` when no such backend.

    >>> {finding.severity for finding in findings("x86")} <= {"note", "warning"}
    True
    """
    from backquant.backend_config import files
    from backquant.match.satisfiable import unsatisfiable

    if not is_spec_file(backend):
        config = get_backend_config(backend)
        engine, lacking = _engine(config)
        return config.validate(engine) + unsatisfiable(config) + lacking
    packages = tuple(allow or ())
    found = files.check_file(backend, packages)
    if any(finding.rule == "file" for finding in found):
        return found
    engine, lacking = _engine(files.load_file(backend, packages))
    return files.check_file(backend, packages, engine, unsatisfiable) + lacking


def _engine(config: BackendConfig) -> tuple[object, list[Finding]]:
    """The engine of ``config`` on this machine, or what is to say about its absence."""
    if config.engine is None:
        return None, []
    from backquant.lower.engine import engine_info, list_engines

    try:
        return engine_info(config.engine), []
    except EngineError as error:
        severity: Severity = "note" if config.engine in list_engines() else "error"
        return None, [Finding(severity, "engine", "engine", error.what, error.fix)]
