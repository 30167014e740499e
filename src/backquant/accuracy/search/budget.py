"""What a search has to keep to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from backquant.errors import UsageError, did_you_mean

_FIX = 'budget={"max_drop": 0.01}, or {"max_ms": 5.0}, or both'


@dataclass(frozen=True)
class Budget:
    """Limits of a search; ``None``: no limit.

    ``max_drop``: by how much the metric may fall below the float model's. ``min_sqnr``: the least SQNR of the
    outputs, in dB. If one of these two is given, the search minimises time (or bit-operations, where time is
    not measured) within all limits; otherwise it minimises the loss.
    ``max_ms``: milliseconds of one call on the example inputs. ``max_ratio``: that time divided by the float
    model's. ``max_bytes``: size of the weights. ``max_bitops``: multiply-adds, each times the bits of both
    factors.

    >>> Budget.of({"max_ratio": 0.5}).to_dict()
    {'max_ratio': 0.5}
    """

    max_drop: float | None = None
    min_sqnr: float | None = None
    max_ms: float | None = None
    max_ratio: float | None = None
    max_bytes: float | None = None
    max_bitops: float | None = None

    @classmethod
    def of(cls, given: Any) -> Budget:
        """A budget as it is, or from a mapping. Raises ``UsageError`` for anything else."""
        if isinstance(given, cls):
            found = given
        elif isinstance(given, Mapping):
            known = [field.name for field in fields(cls)]
            for name in given:
                if name not in known:
                    fix = did_you_mean(str(name), known, f"one of {', '.join(known)}")
                    raise UsageError(
                        f"there is no budget {name!r}", where=f"budget={given!r}", fix=fix
                    )
            found = cls(**given)
        else:
            raise UsageError(
                f"{type(given).__name__} is no budget", where=f"budget={given!r}", fix=_FIX
            )
        found._check()
        return found

    @property
    def limits_loss(self) -> bool:
        """Whether it limits the loss of accuracy."""
        return self.max_drop is not None or self.min_sqnr is not None

    @property
    def limits_time(self) -> bool:
        """Whether it limits the time of a call."""
        return self.max_ms is not None or self.max_ratio is not None

    def to_dict(self) -> dict[str, float]:
        """What it limits."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.to_dict().items())

    def _check(self) -> None:
        said = self.to_dict()
        if not said:
            raise UsageError("the budget limits nothing", where="budget={}", fix=_FIX)
        for name, value in said.items():
            least = -math.inf if name == "min_sqnr" else 0.0
            if type(value) not in (int, float) or not least <= value < math.inf:
                raise UsageError(
                    f"{name} is a number that is not negative, got {value!r}",
                    where=f"budget={said!r}",
                    fix=_FIX,
                )


def parsed(given: Iterable[str]) -> Budget:
    """A budget in the words of a command line.

    >>> parsed(["max_drop=0.01", "max_ms=5"]).to_dict()
    {'max_drop': 0.01, 'max_ms': 5.0}
    """
    found: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError as error:
            raise UsageError(
                f"{text!r} is no limit",
                where=f"--budget {text}",
                fix="--budget max_drop=0.01 --budget max_ms=5",
            ) from error
    return Budget.of(found)
