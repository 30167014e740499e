"""How far an engine's results may be from the integer reference, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from backquant.backend_config.checks import check_keys, check_number
from backquant.errors import SpecError


@dataclass(frozen=True)
class Tolerance:
    """By how many ``steps`` results may be off: integers, or 255ths of the range of float results.

    ``reason``: why they are off (the kernel rounds twice, its table holds floats). Operators that only move
    values have no tolerance. Raises ``SpecError`` for less than 0 steps, and without a reason.

    >>> print(Tolerance(1, "requantized in float32"))
    1 step: requantized in float32
    """

    steps: int | float
    reason: str

    def __post_init__(self) -> None:
        check_number(self.steps, "steps")
        if self.steps is None or not self.steps >= 0:
            raise SpecError(f"steps must be 0 or more, got {self.steps!r}", where="steps")
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise SpecError(
                f"a tolerance has a reason, got {self.reason!r}",
                where="reason",
                fix="say what the engine computes otherwise: reason='requantized in float32'",
            )

    def __str__(self) -> str:
        return f"{self.steps:g} step{'' if self.steps == 1 else 's'}: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """Its fields.

        >>> Tolerance(1, "rounds twice").to_dict()
        {'steps': 1, 'reason': 'rounds twice'}
        """
        return asdict(self)


def tolerance_from(value: Any) -> Tolerance | None:
    """``value`` itself, or the ``Tolerance`` of its mapping.

    >>> tolerance_from({"steps": 1, "reason": "rounds twice"})
    Tolerance(steps=1, reason='rounds twice')
    """
    if value is None or isinstance(value, Tolerance):
        return value
    if not isinstance(value, Mapping):
        raise SpecError(
            f"a tolerance is its steps and a reason, got {value!r}",
            fix='{"steps": 1, "reason": "requantized in float32"}',
        )
    check_keys(value, ("steps", "reason"), "Tolerance")
    return Tolerance(value.get("steps"), value.get("reason"))  # type: ignore[arg-type]
