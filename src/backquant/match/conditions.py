"""Check the conditions of a backend entry (kernel sizes, groups, shapes) at one match.

As in SQL there are three answers: true, false and unknown. A condition that is false becomes a refusal
whose fix is the nearest value that the condition admits. An unknown one is refused as well: the reason
says what is missing (example inputs), or that the operator does not have this quantity.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from backquant.backend_config.conditions import (
    AllOf,
    AnyOf,
    Comparison,
    Condition,
    Literals,
    NotSo,
    conjuncts,
)
from backquant.backend_config.conditions.expressions import (
    NEIGHBOURS,
    Apply,
    Expression,
    Item,
    Number,
    Quantity,
)
from backquant.match.refusal import Refusal
from backquant.operators import find, moves_values
from backquant.operators.facts import Unknown, UseFacts
from backquant.reason_codes import ReasonCode

RULE = ReasonCode.CONDITION
_SHOWN = 6
_EQUALITIES = ("equals", "one_of")
_SIGNS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
}
_WHOLE: dict[str, Callable[[Any], Any]] = {
    "product": math.prod,
    "sum": sum,
    "max": max,
    "min": min,
    "count": len,
}
_EACH: dict[str, Callable[[Any], Any]] = {"abs": abs, "ceil": math.ceil, "floor": math.floor}


def unmet(
    condition: Condition | None, use: UseFacts, beside: Condition | None = None
) -> tuple[Refusal, ...]:
    """One refusal for each condition that is false or unknown. The proposed fixes also satisfy the conditions
    ``beside``.

    >>> from torch import fx, nn
    >>> from backquant.backend_config.conditions import condition_from
    >>> from backquant.graph import GraphIndex
    >>> from backquant.graph.shapes import GraphValues
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Conv2d(4, 8, 9)))
    >>> node = list(gm.graph.nodes)[1]
    >>> use = UseFacts(GraphIndex(gm), GraphValues(None), node, node)
    >>> [refusal] = unmet(condition_from({"kernel_size": {"max": 7}, "groups": 1}), use)
    >>> refusal.asked, refusal.admitted, refusal.fix
    ('kernel_size 9, 9', 'kernel_size ≤ 7', 'kernel_size 7 in place of 9')
    """
    parts = conjuncts(condition)
    facts = _Use(use, (*parts, *conjuncts(beside)))
    found = (_answer(part, facts) for part in parts)
    return tuple(answer.refusal for answer in found if answer.refusal is not None)


@dataclass(frozen=True)
class _Answer:
    """``holds`` is ``None`` where the answer is unknown. Unless it is true, ``refusal`` says why."""

    holds: bool | None
    refusal: Refusal | None = None
    facts: tuple[str, ...] = ()  # the values that were looked at


@dataclass(frozen=True)
class _Use:
    """One use of an operator, and every condition that has to hold there."""

    facts: UseFacts
    together: tuple[Condition, ...]

    def with_parts(self, condition: Condition) -> _Use:
        return replace(self, together=(*self.together, *conjuncts(condition)))


def _answer(condition: Condition, use: _Use) -> _Answer:
    if isinstance(condition, Comparison):
        return _compared(condition, use)
    if isinstance(condition, NotSo):
        return _negated(condition, use)
    answers = [_answer(part, use.with_parts(part)) for part in condition.conditions]
    facts = tuple(dict.fromkeys(fact for each in answers for fact in each.facts))
    if isinstance(condition, AllOf):
        wrong = next((a for a in answers if a.holds is False), None) or next(
            (a for a in answers if a.holds is None), None
        )
        if wrong is None or wrong.refusal is None:
            return _Answer(True, None, facts) if wrong is None else replace(wrong, facts=facts)
        fixes = [a.refusal.fix for a in answers if a.refusal is not None]
        fix = " and ".join(dict.fromkeys(fixes)) if all(fixes) else ""
        return replace(wrong, refusal=replace(wrong.refusal, fix=fix), facts=facts)
    if any(each.holds for each in answers):
        return _Answer(True, None, facts)
    return _none_of(condition, answers, facts)


def _none_of(condition: AnyOf, answers: list[_Answer], facts: tuple[str, ...]) -> _Answer:
    """None of several holds: one of their fixes is enough."""
    unknown = any(answer.holds is None for answer in answers)
    refusals = [a.refusal for a in answers if a.refusal is not None]
    fixes = [refusal.fix for refusal in refusals if refusal.fix]
    whys = [a.refusal.asked for a in answers if a.holds is None and a.refusal is not None]
    asked = ", ".join(dict.fromkeys([*facts, *whys]))
    fix = ", or ".join(dict.fromkeys(fixes))
    return _Answer(None if unknown else False, Refusal(RULE, asked, str(condition), fix), facts)


def _negated(condition: NotSo, use: _Use) -> _Answer:
    inner = _answer(condition.condition, use)
    if inner.holds is None:
        refusal = inner.refusal
        told = None if refusal is None else replace(refusal, admitted=str(condition))
        return _Answer(None, told, inner.facts)
    matching = _matching(condition, use)
    if not (inner.holds if matching is None else matching):
        return _Answer(True, None, inner.facts)
    fix = ""
    if isinstance(condition.condition, Comparison) and condition.condition.relation in _EQUALITIES:
        left = matching or value_of(condition.condition.left, use.facts)
        if not isinstance(left, Unknown) and len(left) > 0:
            fix = _nearest(condition.condition, left[0], (), use.with_parts(condition))
    return _Answer(False, Refusal(RULE, ", ".join(inner.facts), str(condition), fix), inner.facts)


def _matching(condition: NotSo, use: _Use) -> list[Any] | None:
    """The values for which what must hold for none does; of the operators around those that are named. None:
    the condition is about all values together."""
    parts = [part for part in conjuncts(condition.condition) if isinstance(part, Comparison)]
    of_each = condition.each and len(parts) == len(conjuncts(condition.condition))
    if not of_each and not (len(parts) == 1 and _is_neighbour(parts[0])):
        return None
    found: list[Any] = []
    for index, part in enumerate(parts):
        left, right = value_of(part.left, use.facts), _right(part, use.facts)
        if isinstance(left, Unknown) or isinstance(right, Unknown):
            return None
        values = _compared_values(left, right)
        together = part.relation == "one_of" or len(right) != len(values)
        bounds = [right] * len(values) if together else [(bound,) for bound in right]
        holding = [v for v, b in zip(values, bounds, strict=True) if _holds(part, (v,), b)]
        found = [v for v in found if v in holding] if index else holding
    return found


def _is_neighbour(comparison: Comparison) -> bool:
    return isinstance(comparison.left, Quantity) and comparison.left.name in NEIGHBOURS


def _compared(comparison: Comparison, use: _Use) -> _Answer:
    left, right = value_of(comparison.left, use.facts), _right(comparison, use.facts)
    for side in (left, right):
        if isinstance(side, Unknown):
            return _Answer(None, Refusal(RULE, side.why, str(comparison), side.fix))
    assert not isinstance(left, Unknown) and not isinstance(right, Unknown)
    facts = _facts(comparison, left, right)
    if _holds(comparison, left, right):
        return _Answer(True, None, facts)
    broken = list(_broken(comparison, left, right))
    if not broken:
        return _Answer(False, Refusal(RULE, ", ".join(facts), str(comparison)), facts)
    value, bound = broken[0]
    fix = _nearest(comparison, value, bound, use)
    return _Answer(False, Refusal(RULE, ", ".join(facts), str(comparison), fix), facts)


def _right(comparison: Comparison, use: UseFacts) -> tuple[Any, ...] | Unknown:
    right = comparison.right
    return right.values if isinstance(right, Literals) else value_of(right, use)


def _facts(
    comparison: Comparison, left: tuple[Any, ...], right: tuple[Any, ...]
) -> tuple[str, ...]:
    found = (f"{comparison.left} {_listed(left)}",)
    shows = not isinstance(comparison.right, (Literals, Number))
    return (*found, f"{comparison.right} {_listed(right)}") if shows else found


def _listed(values: tuple[Any, ...]) -> str:
    """The values as text; of many numbers only the smallest and the largest."""
    if len(values) > _SHOWN and all(isinstance(value, (int, float)) for value in values):
        return f"from {_one(min(values))} to {_one(max(values))}"
    return ", ".join(map(_one, values))


def _one(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- values ------------------------------------------------------------------------------------------
def value_of(expression: Expression, use: UseFacts) -> tuple[Any, ...] | Unknown:
    """The values of an expression at one use, or why they are not known."""
    if isinstance(expression, Quantity):
        return use.read(expression)
    if isinstance(expression, Number):
        return (expression.value,)
    if isinstance(expression, Item):
        return _item(expression, use)
    sides = [value_of(argument, use) for argument in expression.arguments]
    for side in sides:
        if isinstance(side, Unknown):
            return side
    try:
        return _applied(
            expression, [_each(side) for side in sides if not isinstance(side, Unknown)]
        )
    except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        return Unknown(f"{expression} cannot be computed: {error}")


def _each(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """The items of a parameter that is a list (``pad``), which is one value where lists are compared."""
    return values[0] if len(values) == 1 and isinstance(values[0], tuple) else values


def _item(expression: Item, use: UseFacts) -> tuple[Any, ...] | Unknown:
    found = value_of(expression.of, use)
    if isinstance(found, Unknown):
        return found
    values = _each(found)
    if expression.whole:
        return values[expression.start : expression.stop]
    assert expression.start is not None
    try:
        return (values[expression.start],)
    except IndexError:
        return Unknown(f"{expression.of} has {len(values)} values: {_listed(values)}")


def _applied(expression: Apply, sides: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    name = expression.function
    if name in _WHOLE:
        return (_WHOLE[name](sides[0]),)
    if name in _EACH:
        return tuple(_EACH[name](value) for value in sides[0])
    pairs = _paired(*sides)
    if pairs is None:
        raise ValueError(f"{len(sides[0])} and {len(sides[1])} values")
    return tuple(_SIGNS[name](one, two) for one, two in pairs)


def _paired(one: tuple[Any, ...], two: tuple[Any, ...]) -> list[tuple[Any, Any]] | None:
    """Pairs of values from both sides; a single value is paired with every value of the other side. ``None``
    where both sides have several values, and not equally many."""
    if len(two) == 1:
        return [(value, two[0]) for value in one]
    if len(one) == 1:
        return [(one[0], value) for value in two]
    return list(zip(one, two, strict=True)) if len(one) == len(two) else None


# -- comparing ---------------------------------------------------------------------------------------
def _holds(comparison: Comparison, left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    left = _compared_values(left, right)
    if comparison.relation == "one_of":
        return all(any(_same(value, each) for each in right) for value in left)
    pairs = _paired(left, right)
    if pairs is None:
        return False
    try:
        return all(_TESTS[comparison.relation](value, bound) for value, bound in pairs)
    except (TypeError, ZeroDivisionError):  # a string, or None, compared with a number
        return False


def _compared_values(left: tuple[Any, ...], right: tuple[Any, ...]) -> tuple[Any, ...]:
    """A list is one value beside lists; beside numbers and words each of its items is."""
    beside_lists = all(isinstance(value, tuple) for value in right)
    return left if beside_lists or (left and left[0] in right) else _each(left)


def _same(value: Any, other: Any) -> bool:
    if isinstance(value, bool) or isinstance(other, bool):
        return value is other
    return bool(value == other)


_TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "min": operator.ge,
    "max": operator.le,
    "equals": _same,
    "multiple_of": lambda value, step: value % step == 0,
}


def _nearest(comparison: Comparison, value: Any, bound: tuple[Any, ...], use: _Use) -> str:
    """The value nearest to ``value`` that satisfies all conditions on this quantity; ``value`` is what failed
    ``comparison`` with ``bound``. None of the operators before and after."""
    if _is_neighbour(comparison):
        return ""
    others = replace(use, together=tuple(part for part in use.together if part != comparison))
    own = [(comparison.relation, bound)] if bound else []
    asked = [*own, *_relations(comparison.left, others)]
    near = admitted_by(asked, _divided(comparison.left, use)).nearest(value)
    return "" if near is None else f"{comparison.left} {_one(near)} in place of {_one(value)}"


def _relations(left: Expression, use: _Use) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The conditions on one quantity: each relation (``max``, ``in``, …) with its values."""
    for part in use.together:
        inner = part.condition if isinstance(part, NotSo) else part
        if not isinstance(inner, Comparison) or str(inner.left) != str(left):
            continue
        values = _right(inner, use.facts)
        excludes = inner.relation in _EQUALITIES
        if isinstance(values, Unknown) or (inner is not part and not excludes):
            continue
        yield ("not" if inner is not part else inner.relation), values


def _divided(left: Expression, use: _Use) -> Iterator[int]:
    """The numbers of channels that the number of groups has to divide."""
    if left != Quantity("groups"):
        return
    for name in ("in_channels", "out_channels"):
        values = use.facts.read(Quantity(name))
        if not isinstance(values, Unknown):
            yield from values


def _broken(
    comparison: Comparison, left: tuple[Any, ...], right: tuple[Any, ...]
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The pairs of values for which a comparison is false."""
    left = _compared_values(left, right)
    if comparison.relation == "one_of":
        yield from ((v, right) for v in left if not any(_same(v, each) for each in right))
        return
    test = _TESTS[comparison.relation]
    for value, bound in _paired(left, right) or ():
        try:
            if not test(value, bound):
                yield value, (bound,)
        except (TypeError, ZeroDivisionError):
            return


# The value for a fix to propose: the nearest to the present one that satisfies all conditions on a
# quantity.
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


# Which calls of ``F.scaled_dot_product_attention`` can be written as two products and a softmax.

_ARGUMENTS = (
    *("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
)


def as_products(node: fx.Node) -> dict[str, Any] | None:
    """The arguments of attention that has a form with products, by name; ``None`` for any other node.

    Dropout, shared heads, and masks that may be added have none; masks of bools are recognised by the node
    that makes them, or as constants.

    >>> graph = fx.Graph()
    >>> q = graph.placeholder("q")
    >>> attention = torch.nn.functional.scaled_dot_product_attention
    >>> list(as_products(graph.call_function(attention, (q, q, q))))
    ['query', 'key', 'value']
    >>> as_products(graph.call_function(attention, (q, q, q, graph.placeholder("mask")))) is None
    True
    """
    known = find(node.target) if node.op == "call_function" else None
    if known is None or known.name != "scaled_dot_product_attention":
        return None
    given = dict(zip(_ARGUMENTS, node.args, strict=False)) | node.kwargs
    mask = given.get("attn_mask")
    if given.get("dropout_p") or given.get("enable_gqa"):
        return None
    return given if mask is None or _is_bool(mask) else None


# -- boolean masks, recognized by the operators that make them -------------------------------------------
_COMPARISONS = frozenset(
    {
        *("lt", "le", "gt", "ge", "eq", "ne", "isfinite", "isnan", "bool"),
        *("logical_and", "logical_or", "logical_not", "logical_xor"),
    }
)
_BITWISE = frozenset(
    {
        *("and_", "or_", "invert", "__and__", "__or__", "bitwise_and", "bitwise_or", "bitwise_not"),
    }
)
_TYPED = frozenset({"to", "_to_copy", "ones", "new_ones", "full", "new_full"})

# They may set entries of a mask to False, or select some: a mask stays a mask.
_TRIANGLES = frozenset({"tril", "triu", "index", "getitem"})


def _is_bool(node: object) -> bool:
    """Whether a value holds bools for certain; additive masks and inputs of the model do not."""
    if isinstance(node, fx.Node) and node.op == "get_attr":
        constant = operator.attrgetter(str(node.target))(node.graph.owning_module)
        return getattr(constant, "dtype", None) is torch.bool
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else node.target.__name__
    name = name.partition(".")[0]
    if name in _TYPED:
        return torch.bool in (*node.args, *node.kwargs.values())
    if moves_values(node.target) or name in _TRIANGLES:
        return _is_bool(node.args[0])
    return name in _COMPARISONS or (name in _BITWISE and all(map(_is_bool, node.all_input_nodes)))
