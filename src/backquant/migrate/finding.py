"""What migration leaves to a person, and what became of a file: values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, order=True)
class Finding:
    """One place that needs a person: where, what, why, and how.

    ``path`` is the file as it was asked for (a notebook has ``#cell N`` behind it); ``line`` counts
    from 1 in the file as it was. ``holds`` says that the file was left as it is because of it.

    >>> print(Finding("a.py", 3, 0, "TorchScript", "quantize_jit", "no counterpart", "use prepare_fx"))
    a.py:3: quantize_jit (TorchScript)
      why  no counterpart
      how  use prepare_fx
    """

    path: str
    line: int
    column: int
    kind: str
    what: str
    why: str
    how: str
    holds: bool = False

    def __str__(self) -> str:
        where = f"{self.path}:{self.line}" if self.line else self.path
        return f"{where}: {self.what} ({self.kind})\n  why  {self.why}\n  how  {self.how}"


@dataclass(frozen=True)
class FileResult:
    """What became of one file: its text before and after, and what a person has to do.

    ``after`` equals ``before`` where nothing changes. ``written``: the file on disk holds ``after``.

    >>> FileResult("a.py", "x\\n", "y\\n").changed
    True
    """

    path: str
    before: str
    after: str
    findings: tuple[Finding, ...] = ()
    written: bool = field(default=False, compare=False)

    @property
    def changed(self) -> bool:
        return self.before != self.after

    @property
    def held(self) -> bool:
        """Whether the file was left as it is because part of it has no counterpart."""
        return any(finding.holds for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Path, what happened, and the number of findings, for JSON."""
        return {
            "path": self.path,
            "changed": self.changed,
            "written": self.written,
            "held": self.held,
            "findings": len(self.findings),
        }
