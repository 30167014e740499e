"""One model on one target: what was measured, or why there is no figure; as a line of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

__all__ = ["FORMS", "Cell", "Form", "Ratio", "append", "read"]

#: In the order in which they are prepared.
FORMS = ("ours", "float", "own")


@dataclass(frozen=True)
class Ratio:
    """``value``: the median over the turns; ``spread``: half the distance of the quartiles, as a share."""

    value: float
    spread: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ± {self.spread:.0%}"


@dataclass(frozen=True)
class Form:
    """A model as one quantizer (or none) made it.

    ``turns``: milliseconds of CPU time of the fastest run of each turn. ``quality``: ``sqnr`` in dB
    against the float model in PyTorch, and the task's own figures. ``failed``: why there is nothing.
    """

    turns: tuple[float, ...] = ()
    quality: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    failed: str = ""

    @property
    def milliseconds(self) -> float:
        return median(self.turns)


@dataclass(frozen=True)
class Cell:
    """``facts``: what the target says of our form: ``integer_share``, ``kernels``, ``left_in_float`` …

    ``commit``: of the repository, with ``+`` when files were changed.
    """

    model: str
    target: str
    commit: str
    forms: dict[str, Form] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    failed: str = ""

    @property
    def ours(self) -> Form:
        return self.forms.get("ours", Form(failed=self.failed or "not measured"))

    def against(self, other: str) -> Ratio | None:
        """How many times as fast as ``"float"`` or ``"own"`` ours is; ``None`` when either is missing."""
        mine, theirs = self.ours.turns, self.forms.get(other, Form()).turns
        if not mine or not theirs:
            return None
        ratios = [b / a for a, b in zip(mine, theirs, strict=True)]
        low, high = np.percentile(ratios, [25, 75])
        return Ratio(median(ratios), float((high - low) / 2 / median(ratios)))

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        ratios = {name: self.against(name) for name in ("float", "own")}
        return data | {f"against_{name}": asdict(r) for name, r in ratios.items() if r is not None}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Cell:
        kept = {key: value for key, value in data.items() if not key.startswith("against_")}
        forms = {
            name: Form(**{**form, "turns": tuple(form["turns"])})
            for name, form in kept.pop("forms").items()
        }
        return cls(forms=forms, **kept)


def append(cell: Cell, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(cell.to_dict()) + "\n")


def read(path: Path) -> list[Cell]:
    """The last cell of each model and target, in the order of the file."""
    found: dict[tuple[str, str], Cell] = {}
    for line in _lines(path):
        cell = Cell.from_dict(json.loads(line))
        found[cell.model, cell.target] = cell
    return list(found.values())


def _lines(path: Path) -> Iterable[str]:
    lines: Sequence[str] = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return (line for line in lines if line.strip())
