"""What is wrong with a description, and the refusal of one that contradicts itself before anything runs."""

from __future__ import annotations

import os
import re

from backquant.backend_config import BackendConfig
from backquant.backend_config.validate import Finding, Severity
from backquant.errors import EngineError, SpecError
from backquant.lower.engine import engine_info, list_engines
from backquant.match.satisfiable import unsatisfiable

_CONFIG = re.compile(r"(dtype_configs\[\d+\]).*")


def description_findings(config: BackendConfig) -> list[Finding]:
    """Everything there is to say about a description, what only its engine knows included; that no request
    satisfies a dtype config is said where nothing else is wrong in it.
    """
    engine, lacking = _engine(config)
    known = config.validate(engine)
    wrong = {
        (finding.entry, _CONFIG.sub(r"\1", finding.field))
        for finding in known
        if finding.severity == "error"
    }
    more = (f for f in unsatisfiable(config) if (f.entry, _CONFIG.sub(r"\1", f.field)) not in wrong)
    return [*known, *more, *lacking]


def file_findings(path: str | os.PathLike[str], allow: tuple[str, ...] = ()) -> list[Finding]:
    """As ``description_findings``, of a file, each with file, line and field.

    Raises ``SpecError`` when there is no such file, or it cannot be read.
    """
    from backquant.backend_config import files  # read here: the models of files take time to make

    return files.check_file(path, allow, description_findings)


def sound_file(path: str | os.PathLike[str], allow: tuple[str, ...] = ()) -> BackendConfig:
    """The description in a file in which there is no error.

    Raises ``SpecError`` with file, line and field of everything that is wrong.

    >>> sound_file("none.yaml")
    Traceback (most recent call last):
    backquant.errors.SpecError: no such file
      where  none.yaml
    """
    from backquant.backend_config import files

    config = files.load_file(path, allow)
    refuse_errors(file_findings(path, allow))
    return config


def refuse_errors(found: list[Finding]) -> None:
    """Raise ``SpecError`` where one of ``found`` is an error, with all that are."""
    errors = [finding for finding in found if finding.severity == "error"]
    if not errors:
        return
    first, *others = errors
    what = f"{first.message} (and {len(others)} more)" if others else first.message
    told = [f"{one.place}: {one.message}" for one in others]
    raise SpecError(what, where="\n         ".join([first.place, *told]), fix=first.fix)


def _engine(config: BackendConfig) -> tuple[object, list[Finding]]:
    """The engine of ``config`` on this machine, or what is to say about its absence."""
    if config.engine is None:
        return None, []
    try:
        return engine_info(config.engine), []
    except EngineError as error:
        severity: Severity = "note" if config.engine in list_engines() else "error"
        return None, [Finding(severity, "engine", "engine", error.what, error.fix)]
