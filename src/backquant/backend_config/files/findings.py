"""Everything there is to say about a spec file: what is wrong in it, then what validation finds."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from backquant.backend_config.config import BackendConfig
from backquant.backend_config.files.read import Base
from backquant.backend_config.files.store import load_with_places
from backquant.backend_config.import_paths import SpecFileError
from backquant.backend_config.validate import Finding, validate


def check_file(
    path: str | os.PathLike[str],
    allow: tuple[str, ...] = (),
    findings_of: Callable[[BackendConfig], list[Finding]] = validate,
) -> list[Finding]:
    """Findings about the spec file at ``path``, each with file and line; empty when all is well.

    A file that cannot be loaded gives its problems as findings of rule ``file``; one that can is judged by
    ``findings_of``. Raises ``SpecError`` only when there is no such file, or it cannot be read.

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
    return findings_in(loaded, findings_of)


def findings_in(
    loaded: Base, findings_of: Callable[[BackendConfig], list[Finding]]
) -> list[Finding]:
    """The findings about what was loaded, with file, line and field; what is said of one place for several
    patterns stands once.
    """
    patterns = list(loaded.config.shared_entries)
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings_of(BackendConfig.of(loaded.config)):
        written = None if finding.entry is None else loaded.places.get(patterns[finding.entry])
        place = written.place(finding.field) if written else loaded.head(finding.place)
        key = (place or finding.place, finding.severity, finding.rule, finding.message, finding.fix)
        groups.setdefault(key, []).append(finding)
    located = []
    for (place, *_), same in groups.items():
        first, of = same[0], ""
        if first.entry is not None and place != first.place:
            more = f" and {len(same) - 1} more" if len(same) > 1 else ""
            of = f" ({patterns[first.entry]}{more})"
        located.append(replace(first, place=f"{place}{of}"))
    return located
