"""Comparisons that no value can satisfy, alone or together."""

from __future__ import annotations

import math
from collections.abc import Iterator

from backquant.backend_config.conditions.condition import (
    AnyOf,
    Comparison,
    Condition,
    Literals,
    NotSo,
    conjuncts,
)
from backquant.backend_config.conditions.expressions import Number, Quantity
from backquant.backend_config.conditions.quantities import OPERATOR, TENSOR


def contradictions(condition: Condition | None) -> Iterator[str]:
    """What cannot hold, in words. Only comparisons with plain numbers and words are looked at.

    >>> from backquant.backend_config.conditions import condition_from
    >>> list(contradictions(condition_from({"stride": {"min": 4, "max": 3}, "batch": 1})))
    ['nothing satisfies stride ≥ 4, stride ≤ 3']
    """
    by_left: dict[str, list[Comparison]] = {}
    for part in conjuncts(condition):
        if isinstance(part, Comparison):
            by_left.setdefault(str(part.left), []).append(part)
        elif isinstance(part, AnyOf):
            branches = [list(contradictions(each)) for each in part.conditions]
            if all(branches):
                yield branches[0][0]
        elif isinstance(part, NotSo) and part.condition in conjuncts(condition):
            yield f"nothing satisfies {part.condition}, {part}"
    for comparisons in by_left.values():
        if not _satisfiable(comparisons):
            yield f"nothing satisfies {', '.join(map(str, comparisons))}"


def _satisfiable(comparisons: list[Comparison]) -> bool:
    low, high, step = _lowest(comparisons[0]), math.inf, 1.0
    allowed: set[object] | None = None
    for comparison in comparisons:
        right = comparison.right
        if isinstance(right, Literals):
            allowed = set(right.values) if allowed is None else allowed & set(right.values)
        elif not isinstance(right, Number):
            continue
        elif comparison.relation == "min":
            low = max(low, right.value)
        elif comparison.relation == "max":
            high = min(high, right.value)
        elif comparison.relation == "multiple_of":
            if right.value <= 0:
                return False
            step = right.value if step == 1 else math.lcm(int(step), int(right.value))
        else:
            allowed = {right.value} if allowed is None else allowed & {right.value}
    if allowed is None:
        first = low if step == 1 or low == -math.inf else math.ceil(low / step) * step
        return first <= high
    return any(_fits(value, low, high, step) for value in allowed)


def _fits(value: object, low: float, high: float, step: float) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return True
    return low <= value <= high and (step == 1 or value % step == 0)


def _lowest(comparison: Comparison) -> float:
    left = comparison.left
    known = None
    if isinstance(left, Quantity):
        known = OPERATOR.get(left.name) or TENSOR.get(left.name)
    return -math.inf if known is None or known.lowest is None else known.lowest
