"""The value for a fix to propose: the nearest to the present one that satisfies all conditions on a
quantity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Admitted:
    """The values of one quantity that satisfy its conditions.

    ``least`` and ``greatest``: bounds. ``steps``: the value is a multiple of each. ``options``: it is a
    member of each set. ``excluded``: it is none of these. ``divides``: it divides each.
    """

    least: tuple[float, ...] = ()
    greatest: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    options: tuple[tuple[Any, ...], ...] = ()
    excluded: tuple[Any, ...] = ()
    divides: tuple[int, ...] = ()

    def nearest(self, value: Any) -> Any:
        """The nearest that is admitted; ``None`` where none was found.

        >>> Admitted(greatest=(24,), steps=(16,)).nearest(30), Admitted(excluded=(2,)).nearest(2)
        (16, 3)
        >>> Admitted(least=(2,), divides=(9, 3)).nearest(1)
        3
        """
        if any(not _is_number(option) for options in self.options for option in options):
            words = [option for option in self.options[0] if self._takes(option)]
            return words[0] if words else None
        if not _is_number(value):
            return None
        try:
            found = [option for option in self._candidates(value) if self._takes(option)]
            return min(found, key=lambda option: (abs(option - value), -option), default=None)
        except OverflowError:  # an int too large for a float, compared with floats
            return None

    def _takes(self, value: Any) -> bool:
        if not all(value in options for options in self.options) or value in self.excluded:
            return False
        if not _is_number(value):
            return not (self.least or self.greatest or self.steps or self.divides)
        within = all(bound <= value for bound in self.least) and all(
            value <= bound for bound in self.greatest
        )
        return (
            within
            and all(step > 0 and value % step == 0 for step in self.steps)
            and all(value > 0 and whole % value == 0 for whole in self.divides)
        )

    def _candidates(self, value: Any) -> Iterator[Any]:
        """Every bound, option and divisor, and multiples of the step beside them."""
        step = math.lcm(*(step for step in self.steps if step > 0))
        divisors = _divisors(math.gcd(*self.divides)) if self.divides else ()
        at = [*self.least, *self.greatest, *divisors, *(o for each in self.options for o in each)]
        yield from at
        for base in (value, *at):
            below = base // step * step
            yield from (below - step, below, below + step, below + 2 * step)


def _divisors(whole: int) -> Iterator[int]:
    for number in range(1, math.isqrt(whole) + 1):
        if whole % number == 0:
            yield from (number, whole // number)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def admitted_by(
    relations: Iterable[tuple[str, tuple[Any, ...]]], divides: Iterable[int]
) -> Admitted:
    """What comparisons leave, each a relation (``not`` excludes) with its values.

    >>> admitted_by([("min", (2,)), ("one_of", (1, 2, 4)), ("not", (2,))], ()).nearest(1)
    4
    """
    found: dict[str, list[Any]] = {}
    for relation, values in relations:
        if relation in ("one_of", "equals"):
            found.setdefault("options", []).append(values)
        else:
            numbers = [value for value in values if relation == "not" or _is_number(value)]
            found.setdefault(_FIELDS[relation], []).extend(numbers)
    return Admitted(
        **{name: tuple(values) for name, values in found.items()}, divides=tuple(divides)
    )


_FIELDS = {"min": "least", "max": "greatest", "multiple_of": "steps", "not": "excluded"}
