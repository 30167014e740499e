"""Conditions on the use of an operator, as data.

>>> where = condition_from({"kernel_size": {"max": 7}, "groups": {"equals": "in_channels"}})
>>> print(where)
kernel_size ≤ 7, groups = in_channels
>>> condition_data(where)
{'kernel_size': {'max': 7}, 'groups': {'equals': 'in_channels'}}
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from backquant.backend_config.checks import within
from backquant.backend_config.conditions.expressions import (
    OPERATOR,
    TENSOR,
    Apply,
    Expression,
    Item,
    Number,
    Quantity,
    kind_of_quantity,
    parse_expression,
    quantities_in,
)
from backquant.errors import SpecError, did_you_mean

Relation = Literal["min", "max", "equals", "multiple_of", "one_of"]
RELATIONS: tuple[Relation, ...] = get_args(Relation)
_SIGNS = {"min": "≥", "max": "≤", "equals": "=", "multiple_of": "a multiple of", "one_of": "one of"}
_JOINED = ("all", "any", "not")


@dataclass(frozen=True)
class Literals:
    """What a quantity is compared with: words, flags, numbers, or tuples of numbers."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return ", ".join(_literal_text(value) for value in self.values)


@dataclass(frozen=True)
class Comparison:
    """An expression against another, or against literals."""

    left: Expression
    relation: Relation
    right: Expression | Literals

    def __str__(self) -> str:
        return f"{self.left} {_SIGNS[self.relation]} {self.right}"


@dataclass(frozen=True)
class AllOf:
    """Every one of these holds."""

    conditions: tuple[Condition, ...]

    def __str__(self) -> str:
        return ", ".join(_in_list(each) for each in self.conditions)


@dataclass(frozen=True)
class AnyOf:
    """At least one of these holds."""

    conditions: tuple[Condition, ...]

    def __str__(self) -> str:
        return " or ".join(
            f"({each})" if isinstance(each, (AllOf, AnyOf)) else str(each)
            for each in self.conditions
        )


@dataclass(frozen=True)
class NotSo:
    """This does not hold; ``each``, of comparisons of one quantity: for none of its values."""

    condition: Condition
    each: bool = False

    def __str__(self) -> str:
        return f"not ({self.condition})"


Condition: TypeAlias = Comparison | AllOf | AnyOf | NotSo


def _in_list(condition: Condition) -> str:
    return f"({condition})" if isinstance(condition, AnyOf) else str(condition)


def _literal_text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(str, value))})"
    return str(value)


# -- from data ---------------------------------------------------------------------------------------


def condition_from(data: Any) -> Condition | None:
    """The condition that a mapping writes; ``None`` for ``None`` and for an empty one.

    A key is a quantity or an expression, its value a number or word (equal to it), a list (one of these),
    or a mapping of ``min``, ``max``, ``equals``, ``multiple_of``, ``one_of`` and ``not`` (of each value). The
    keys ``all``, ``any`` (lists of mappings) and ``not`` (one, as a whole) join conditions. All of a mapping
    must hold.

    Raises ``SpecError`` with the place for anything else.

    >>> print(condition_from({"any": [{"stride": [1, 2]}, {"not": {"padding": 0}}]}))
    stride one of 1, 2 or not (padding = 0)
    """
    if data is None or isinstance(data, (Comparison, AllOf, AnyOf, NotSo)):
        return data
    if not isinstance(data, Mapping):
        raise SpecError(
            f"a condition is a mapping, got {data!r}", where="", fix="{kernel_size: {max: 7}}"
        )
    found: list[Condition] = []
    for key, value in data.items():
        with within(str(key)):
            found += _joined(key, value) if key in _JOINED else _comparisons(str(key), value)
    return _all_of(found) if found else None


def _all_of(conditions: Sequence[Condition]) -> Condition:
    flat = [part for each in conditions for part in conjuncts(each)]
    return flat[0] if len(flat) == 1 else AllOf(tuple(flat))


def conjuncts(condition: Condition | None) -> tuple[Condition, ...]:
    """The conditions that all have to hold.

    >>> len(conjuncts(condition_from({"rank": {"min": 2, "max": 4}})))
    2
    """
    if condition is None:
        return ()
    return condition.conditions if isinstance(condition, AllOf) else (condition,)


def _joined(key: str, value: Any) -> Iterator[Condition]:
    if key == "not":
        yield NotSo(_some(value))
        return
    if not isinstance(value, (list, tuple)) or not value:
        raise SpecError(
            f"{key} takes a list of conditions, got {value!r}",
            fix=f"{key}: [{{stride: 1}}, {{padding: 0}}]",
        )
    parts = []
    for index, item in enumerate(value):
        with within(f"[{index}]"):
            parts.append(_some(item))
    if key == "all":
        yield from (part for each in parts for part in conjuncts(each))
    else:
        yield parts[0] if len(parts) == 1 else AnyOf(tuple(parts))


def _some(data: Any) -> Condition:
    found = condition_from(data)
    if found is None:
        raise SpecError("a condition that says nothing", fix="{padding: 0}")
    return found


def _comparisons(key: str, value: Any) -> Iterator[Condition]:
    left = parse_expression(key)
    if not isinstance(value, Mapping):
        relation: Relation = "one_of" if isinstance(value, (list, tuple)) else "equals"
        yield Comparison(left, relation, _right(left, relation, value))
        return
    if not value:
        raise SpecError("a comparison that says nothing", fix="{max: 7}")
    for name, item in value.items():
        with within(str(name)):
            if name == "not":
                yield NotSo(_all_of(list(_comparisons(key, item))), each=True)
            elif name in RELATIONS:
                yield Comparison(left, name, _right(left, name, item))
            else:
                raise _unknown_relation(str(name))


def _unknown_relation(name: str) -> SpecError:
    known = (*RELATIONS, "not")
    fix = did_you_mean(name, known, f"one of {', '.join(known)}")
    return SpecError(f"there is no comparison {name!r}", fix=fix)


def _right(left: Expression, relation: Relation, value: Any) -> Expression | Literals:
    kind = kind_of_quantity(left.name) if isinstance(left, Quantity) else "number"
    if relation == "one_of":
        if not isinstance(value, (list, tuple)):
            raise SpecError(f"one_of takes a list, got {value!r}", fix="one_of: [1, 2]")
        return Literals(tuple(_literal(item, kind) for item in value))
    if isinstance(value, (list, tuple)) and relation == "equals":
        return Literals((_literal(value, kind),))
    if kind == "number" and isinstance(value, str):
        return parse_expression(value)
    if type(value) in (int, float):
        return Number(value)
    if relation != "equals" or kind == "number":
        raise SpecError(
            f"{relation} takes a number or an expression, got {value!r}", fix=f"{relation}: 4"
        )
    return Literals((_literal(value, kind),))


def _literal(value: Any, kind: str) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_literal(item, kind) for item in value)
    if kind == "number" and isinstance(value, str):
        parsed = parse_expression(value)
        if isinstance(parsed, Number):
            return parsed.value
    allowed = (int, float) if kind == "number" else (int, float, str, bool, type(None))
    if type(value) not in allowed:
        raise SpecError(f"{value!r} is nothing to compare a {kind} with")
    return value


# -- to data -----------------------------------------------------------------------------------------


def condition_data(condition: Condition) -> dict[str, Any]:
    """The mapping that ``condition_from`` reads as the same condition.

    >>> condition_data(condition_from({"rank": {"min": 2, "max": "groups + 1"}, "shape": "static"}))
    {'rank': {'min': 2, 'max': 'groups + 1'}, 'shape': 'static'}
    """
    mappings: list[dict[str, Any]] = [{}]
    for part in conjuncts(condition):
        key, value = _entry_of(part)
        here = mappings[-1]
        last = next(reversed(here)) if here else None
        if key == last and _can_merge(here[key], value):
            here[key] = {**here[key], **value}
        elif key in here:
            mappings.append({key: value})
        else:
            here[key] = value
    short = [_shortened(mapping) for mapping in mappings]
    return short[0] if len(short) == 1 else {"all": short}


def _can_merge(one: Any, two: Any) -> bool:
    both = isinstance(one, dict) and isinstance(two, dict)
    return both and not set(one) & set(two) and set(two) <= {*RELATIONS, "not"}


def _shortened(mapping: dict[str, Any]) -> dict[str, Any]:
    """``{batch: 1}`` for ``{batch: {equals: 1}}``, ``{stride: [1, 2]}`` for ``{stride: {one_of: …}}``."""
    return {key: value if key in _JOINED else _bare(value) for key, value in mapping.items()}


def _bare(test: dict[str, Any]) -> Any:
    [(relation, value), *more] = test.items()
    if more or relation not in ("equals", "one_of"):
        return test
    if relation == "one_of":
        return value
    return test if isinstance(value, (str, list)) and _is_expression(value) else value


def _is_expression(value: str | list[Any]) -> bool:
    """Whether a bare value could be read otherwise, or is better seen as a comparison."""
    return isinstance(value, list) or not value.isidentifier() or kind_of_quantity(value) != "value"


def _entry_of(condition: Condition) -> tuple[str, Any]:
    if isinstance(condition, Comparison):
        right = condition.right
        if isinstance(right, Literals):
            values = [_plain(value) for value in right.values]
            value = values if condition.relation == "one_of" else values[0]
        else:
            value = right.value if isinstance(right, Number) else str(right)
        return str(condition.left), {condition.relation: value}
    if isinstance(condition, AnyOf):
        return "any", [condition_data(part) for part in condition.conditions]
    if isinstance(condition, NotSo):
        inside = condition_data(condition.condition)
        [(key, test), *_] = inside.items()
        return (key, {"not": test}) if condition.each else ("not", inside)
    return "all", [condition_data(part) for part in condition.conditions]


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


# -- queries -----------------------------------------------------------------------------------------


def comparisons_in(condition: Condition | None) -> Iterator[Comparison]:
    """Every comparison, however joined.

    >>> [str(each) for each in comparisons_in(condition_from({"not": {"padding": 0}, "batch": 1}))]
    ['padding = 0', 'batch = 1']
    """
    if isinstance(condition, Comparison):
        yield condition
    elif isinstance(condition, NotSo):
        yield from comparisons_in(condition.condition)
    elif condition is not None:
        for part in condition.conditions:
            yield from comparisons_in(part)


def quantities_of(condition: Condition | None) -> Iterator[Quantity]:
    """Every quantity that a condition names.

    >>> [str(each) for each in quantities_of(condition_from({"groups": {"equals": "in_channels"}}))]
    ['groups', 'in_channels']
    """
    for comparison in comparisons_in(condition):
        yield from quantities_in(comparison.left)
        if isinstance(comparison.right, (Quantity, Number, Item, Apply)):
            yield from quantities_in(comparison.right)


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
