"""What validation says: findings as values, and the place that each is about."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

#: ``error``: the description contradicts itself. ``warning``: something written has no effect.
#: ``note``: legal, and worth a look.
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One thing that validation found. ``entry`` is the index into ``BackendConfig.configs``, ``field`` the
    path in that entry.

    >>> print(Finding("error", "bounds-order", "entry 3 (torch.add)", "min > max", "swap them"))
    error: entry 3 (torch.add): min > max [bounds-order]
      fix  swap them
    """

    severity: Severity
    rule: str
    place: str
    message: str
    fix: str = ""
    entry: int | None = None
    field: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, as JSON-able data.

        >>> Finding("note", "rule", "place", "message").to_dict()["severity"]
        'note'
        """
        return asdict(self)

    def __str__(self) -> str:
        head = f"{self.place}: " if self.place else ""
        tail = f"\n  fix  {self.fix}" if self.fix else ""
        return f"{self.severity}: {head}{self.message} [{self.rule}]{tail}"


@dataclass(frozen=True)
class Place:
    """Where a rule looks: an entry of a backend, and a field in it.

    >>> place = Place(3, "torch.add").at("dtype_configs[0]").at("input_dtype")
    >>> str(place)
    'entry 3 (torch.add): dtype_configs[0].input_dtype'
    """

    entry: int
    pattern: str
    field: str = ""

    def at(self, part: str) -> Place:
        """The place of a part of this one."""
        return replace(self, field=f"{self.field}.{part}" if self.field else part)

    def find(self, severity: Severity, rule: str, message: str, fix: str = "") -> Finding:
        """A finding here."""
        return Finding(severity, rule, str(self), message, fix, self.entry, self.field)

    def __str__(self) -> str:
        head = f"entry {self.entry} ({self.pattern})"
        return f"{head}: {self.field}" if self.field else head
