"""How far an engine's results may be from the integer reference, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from backquant.backend_config.declared import Record
from backquant.backend_config.kinds import Number


@dataclass(frozen=True, repr=False)
class Tolerance(Record):
    """By how many ``steps`` results may be off: integers, or 255ths of the range of float results.

    ``reason``: why they are off (the kernel rounds twice, its table holds floats). Operators that only move
    values have no tolerance. Raises ``SpecError`` for less than 0 steps, and without a reason.

    >>> print(Tolerance(1, "requantized in float32"))
    1 step: requantized in float32
    """

    steps: Annotated[
        int | float,
        Number(least=0),
        "Of integers; of results in float: of the 255 parts of their range.",
    ]
    reason: Annotated[str, "What the engine computes otherwise."]

    def __str__(self) -> str:
        return f"{self.steps:g} step{'' if self.steps == 1 else 's'}: {self.reason}"
