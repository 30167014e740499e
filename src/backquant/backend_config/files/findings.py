"""Everything there is to say about a spec file: what is wrong in it, then what validation finds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from backquant.backend_config.config import BackendConfig
from backquant.backend_config.files.problems import SpecFileError
from backquant.backend_config.files.store import load_with_places
from backquant.backend_config.validate import Finding, validate


def check_file(
    path: str | os.PathLike[str],
    allow: tuple[str, ...] = (),
    engine: Any = None,
    proof: Callable[[BackendConfig], list[Finding]] = lambda _: [],
) -> list[Finding]:
    """Findings about the spec file at ``path``, each with file and line; empty when all is well.

    A file that cannot be loaded gives its problems as findings of rule ``file``; one that can is
    validated (``engine`` as in ``validate``, ``proof`` finds more). Raises ``SpecError`` only when there
    is no such file, or it cannot be read.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "mine.yaml")
    ...     _ = path.write_text("schema_version: 1\\nname: mine\\nentrys: []\\n")
    ...     [finding] = check_file(path)
    >>> finding.message, finding.fix, finding.place.endswith("mine.yaml:3: entrys")
    ('unknown field', 'did you mean "entries"?', True)
    """
    try:
        loaded = load_with_places(path, allow)
    except SpecFileError as error:
        return [
            Finding("error", "file", problem.place, problem.message, problem.fix)
            for problem in error.problems
        ]
    places = list(loaded.config.entries)
    located = []
    for finding in [*validate(loaded.config, engine), *proof(loaded.config)]:
        found = None if finding.entry is None else loaded.places.get(places[finding.entry])
        place = finding.place if found is None else f"{found[0]}:{found[1]}: {finding.place}"
        located.append(replace(finding, place=place))
    return located
