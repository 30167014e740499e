"""What became of the files, and what is left to a person, as text."""

from __future__ import annotations

from backquant.migrate.finding import FileResult, Finding
from backquant.migrate.run import Migration


def report_text(migration: Migration) -> str:
    """The files that changed or were left; then, by reason, the places that need a person.

    >>> print(report_text(Migration((FileResult("a.py", "x\\n", "y\\n"),))))
    would change   a.py
    <BLANKLINE>
    1 file, 1 would change
    """
    states = [(_state(result), result.path) for result in migration.files]
    files = [f"{state:<14} {path}" for state, path in states if state]
    parts = ["\n".join(files), *_by_reason(migration.findings), _counts(migration)]
    return "\n\n".join(part for part in parts if part)


def _state(result: FileResult) -> str:
    if result.written:
        return "rewritten"
    if result.changed:
        return "would change"
    return "left as it is" if result.held else ""


def _by_reason(findings: tuple[Finding, ...]) -> list[str]:
    """A paragraph per reason: what and why, how, and every place."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.why, finding.how), []).append(finding)
    return [
        "\n".join([f"{kind}: {why}", f"  how  {how}", *(f"  {_place(f)}" for f in places)])
        for (kind, why, how), places in groups.items()
    ]


def _place(finding: Finding) -> str:
    where = f"{finding.path}:{finding.line}" if finding.line else finding.path
    return f"{where}  {finding.what}"


def _counts(migration: Migration) -> str:
    written = sum(result.written for result in migration.files)
    held = sum(result.held for result in migration.files)
    parts = [
        _number(len(migration.files), "file"),
        f"{written} rewritten" if written else "",
        f"{len(migration.changed) - written} would change"
        if len(migration.changed) > written
        else "",
        f"{held} left as they are" if held else "",
        f"{_number(len(migration.findings), 'place')} for a person" if migration.findings else "",
    ]
    counted = [part for part in parts if part]
    return ", ".join(counted) if len(counted) > 1 else f"{counted[0]}, nothing to do"


def _number(count: int, thing: str) -> str:
    return f"{count} {thing}" + ("" if count == 1 else "s")
