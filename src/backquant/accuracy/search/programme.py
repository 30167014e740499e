"""Which option each unit takes: an integer programme, solved by ``scipy.optimize.milp``.

Units pass values to each other, as integers or as floats. Where one gives what another does not take, the
value is converted once for all its readers, and that has a cost:

    quantized ≥ (a reader takes integers) − (the producer gives integers)
    dequantized ≥ (the producer gives integers) − (a reader takes integers)

    rounded ≥ (the producer gives integers), (a reader takes integers)

Rounding costs accuracy, once for the producer and all readers. Producers and readers outside of all units
give and take floats. A unit may give ``either``, at no cost: then the value is dequantized only where some
readers take integers and others do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from backquant.errors import MissingExtraError

__all__ = [
    "Option",
    "Passed",
    "Problem",
    "SearchUnit",
    "check_installed",
    "corrected",
    "retimed",
    "solve",
]

INTEGERS, FLOAT, EITHER = "integers", "float", "either"
_SECONDS = 20.0
_GAP = 1e-4
_LEAST = 0.2  # of a figure stays, whatever wholes say


@dataclass(frozen=True)
class Option:
    """One way for a unit: ``figures`` are ``loss``, ``time`` (microseconds), ``bytes``, ``bitops``.

    ``takes``: ``"integers"`` or ``"float"``; ``gives``: one of these, or ``"either"``.
    """

    name: str
    figures: Mapping[str, float]
    takes: str = FLOAT
    gives: str = FLOAT


@dataclass(frozen=True)
class SearchUnit:
    """Operators that are decided together: what is fused, shares an observer, or is run by one kernel.

    ``timed``: the nodes whose times it has: with ``nodes``, what its kernels run beside them.
    """

    name: str
    operator: str
    nodes: tuple[str, ...]
    options: tuple[Option, ...]
    timed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Passed:
    """A value that goes from one unit to others, by position; ``None``: outside of all units.

    ``quantize`` and ``dequantize``: microseconds. ``loss``: of the outputs, when it is rounded.
    """

    producer: int | None
    readers: tuple[int | None, ...]
    quantize: float
    dequantize: float
    loss: float = 0.0


Picks = tuple[int, ...]


@dataclass(frozen=True)
class Problem:
    """``base``: figures of what is in no unit. ``in_float``: microseconds of the float model as it came,
    beside which times were measured; ``None``: unknown."""

    units: tuple[SearchUnit, ...]
    values: tuple[Passed, ...] = ()
    base: Mapping[str, float] = field(default_factory=dict)
    in_float: float | None = None

    def total(self, picks: Picks, figure: str) -> float:
        """That figure of the whole.

        >>> unit = SearchUnit("fc", "Linear", ("fc",), (Option("float", {"time": 3.0}),))
        >>> Problem((unit,), base={"time": 1.0}).total((0,), "time")
        4.0
        """
        return float(self.columns(figure) @ self.chosen(picks))

    def predicted(self, picks: Picks) -> float:
        """Microseconds of a call. In float as a whole it is the model as it came, whose time is known.

        >>> unit = SearchUnit("fc", "Linear", ("fc",), (Option("float", {"time": 3.0}),))
        >>> Problem((unit,), base={"time": 1.0}, in_float=3.5).predicted((0,))
        3.5
        """
        if self.in_float is not None and not any(picks):
            return self.in_float
        return self.total(picks, "time")

    def columns(self, figure: str) -> Any:
        """What each variable of the programme adds to a figure; the last is always there."""
        own = [option.figures.get(figure, 0.0) for unit in self.units for option in unit.options]
        is_time = figure == "time"
        own += [value.quantize if is_time else 0.0 for value in self.values]
        own += [value.dequantize if is_time else 0.0 for value in self.values]
        own += [value.loss if figure == "loss" else 0.0 for value in self.values]
        return np.array([*own, self.base.get(figure, 0.0)])

    def chosen(self, picks: Picks) -> Any:
        """The variables of the programme for these options."""
        x = [
            float(place == picks[index])
            for index, unit in enumerate(self.units)
            for place in range(len(unit.options))
        ]
        conversions = [self._converted(picks, value) for value in self.values]
        return np.array(
            [*x, *(each for kind in zip(*conversions, strict=True) for each in kind), 1.0]
        )

    def _converted(self, picks: Picks, value: Passed) -> tuple[float, float, float]:
        """Whether a value is quantized, dequantized, rounded."""
        gives = FLOAT if value.producer is None else self.option(picks, value.producer).gives
        takes = [
            reader is not None and self.option(picks, reader).takes == INTEGERS
            for reader in value.readers
        ]
        if gives == FLOAT:
            return float(any(takes)), 0.0, float(any(takes))
        if gives == EITHER:
            return 0.0, float(any(takes) and not all(takes)), float(any(takes))
        return 0.0, float(not all(takes)), 1.0

    def option(self, picks: Picks, unit: int) -> Option:
        """The one that a unit takes."""
        return self.units[unit].options[picks[unit]]


def solve(problem: Problem, least: str, limits: Mapping[str, float]) -> Picks | None:
    """The options with the ``least`` of one figure within ``limits`` of others; ``None`` where there are
    none.

    Raises ``MissingExtraError`` without SciPy.

    >>> slow = Option("float", {"loss": 0.0, "time": 9.0})
    >>> fast = Option("int8", {"loss": 0.5, "time": 3.0}, takes="integers", gives="integers")
    >>> unit = SearchUnit("fc", "Linear", ("fc",), (slow, fast))
    >>> problem = Problem((unit,), (Passed(None, (0,), 1.0, 1.0), Passed(0, (None,), 1.0, 1.0)))
    >>> solve(problem, "time", {}), solve(problem, "time", {"loss": 0.1}), solve(problem, "loss", {"time": 1})
    ((1,), (0,), None)
    """
    milp, constraint, bounds = _scipy()
    cost = problem.columns(least)
    rows = list(_rows(problem))
    for figure, limit in limits.items():
        row = problem.columns(figure)
        size = float(np.abs(row).max()) or 1.0
        places = np.flatnonzero(row)
        scaled = dict(zip(places.tolist(), (row[places] / size).tolist(), strict=True))
        rows.append(_Row(scaled, -np.inf, limit / size))
    size = float(np.abs(cost).max()) or 1.0
    tie = 1e-6 * problem.columns("time") / (problem.columns("time").max() or 1.0)
    count, continuous = len(cost), 3 * len(problem.values) + 1
    low = np.zeros(count)
    low[-1] = 1.0
    lower, upper = [row.least for row in rows], [row.most for row in rows]
    found = milp(
        cost / size + tie,
        constraints=constraint(_sparse(rows, count), lower, upper),
        integrality=np.array([1] * (count - continuous) + [0] * continuous),
        bounds=bounds(low, np.ones(count)),
        options={"time_limit": _SECONDS, "mip_rel_gap": _GAP},
    )
    if found.x is None:
        return None
    starts = [0, *itertools.accumulate(len(unit.options) for unit in problem.units)]
    return tuple(int(found.x[a:b].argmax()) for a, b in itertools.pairwise(starts))


def check_installed() -> None:
    """Raise ``MissingExtraError`` where SciPy is not installed."""
    _scipy()


def _scipy() -> tuple[Any, Any, Any]:
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise MissingExtraError(
            "a search solves an integer programme with SciPy, which is not installed",
            extra="search",
            where="backquant.search",
        ) from error
    return milp, LinearConstraint, Bounds


class _Row(NamedTuple):
    """``least ≤ Σ factor · variable ≤ most``."""

    factors: dict[int, float]
    least: float
    most: float


def _sparse(rows: Sequence[_Row], columns: int) -> Any:
    from scipy.sparse import csr_array

    lengths = np.cumsum([0, *(len(row.factors) for row in rows)])
    places = [place for row in rows for place in row.factors]
    factors = [factor for row in rows for factor in row.factors.values()]
    return csr_array((factors, places, lengths), shape=(len(rows), columns))


def _rows(problem: Problem) -> Iterator[_Row]:
    """One option for each unit, and what makes a conversion needed."""
    starts = [0, *itertools.accumulate(len(unit.options) for unit in problem.units)]
    for a, b in itertools.pairwise(starts):
        yield _Row(dict.fromkeys(range(a, b), 1.0), 1.0, 1.0)

    def those(unit: int | None, side: str, word: str) -> list[int]:
        """The variables of the options of a unit that take or give so."""
        if unit is None:
            return []
        options = enumerate(problem.units[unit].options, starts[unit])
        return [place for place, option in options if getattr(option, side) == word]

    for quantized, value in enumerate(problem.values, starts[-1]):
        dequantized = quantized + len(problem.values)
        rounded = dequantized + len(problem.values)
        gives = those(value.producer, "gives", INTEGERS)
        either = those(value.producer, "gives", EITHER)
        for reader in value.readers:
            takes = those(reader, "takes", INTEGERS)
            yield _needed(quantized, takes, [*gives, *either])
            yield _needed(dequantized, gives, takes)
            yield _needed(rounded, takes, [])
        yield _needed(rounded, gives, [])
        for reader in value.readers if either else ():
            # where some reader takes integers the value is rounded
            yield _needed(dequantized, [*either, rounded], those(reader, "takes", INTEGERS), 1.0)


def _needed(place: int, why: Sequence[int], unless: Sequence[int], beyond: float = 0.0) -> _Row:
    """The variable at ``place`` is at least Σ ``why`` − Σ ``unless`` − ``beyond``."""
    factors = {place: 1.0}
    for there, factor in (*((p, -1.0) for p in why), *((p, 1.0) for p in unless)):
        factors[there] = factors.get(there, 0.0) + factor
    return _Row(factors, -beyond, np.inf)


def corrected(
    problem: Problem, figure: str, measured: Mapping[Picks, float], doubt: float
) -> Problem:
    """``problem`` with figures that explain better what wholes were measured to have.

    What parts have was measured alone; together they differ. Each is changed by a share of itself, the
    largest the most (ridge regression). ``doubt``: how much of a difference is a matter of the combination,
    which says nothing of its parts; without any, each whole would be explained as exactly as can be.

    >>> unit = SearchUnit("fc", "Linear", ("fc",), (Option("int8", {"loss": 0.5}),))
    >>> round(corrected(Problem((unit,)), "loss", {(0,): 0.25}, 0.01).total((0,), "loss"), 2)
    0.25
    """
    own = problem.columns(figure)
    wholes = [(problem.chosen(picks), value) for picks, value in measured.items() if value > 0]
    wholes = [(chosen, value) for chosen, value in wholes if chosen @ own > 0]
    if not wholes:
        return problem
    parts = np.array([chosen * own / value for chosen, value in wholes])
    squares = parts @ parts.T
    squares += doubt * float(squares.diagonal().max()) * np.eye(len(wholes))
    shares = parts.T @ np.linalg.solve(squares, 1.0 - parts.sum(1))
    return _with(problem, figure, own * np.maximum(_LEAST, 1.0 + shares))


def retimed(problem: Problem, picks: Picks, times: Sequence[float | None]) -> Problem:
    """``problem`` with what units took in one combination, where that is known.

    What an operator in float takes more behind integers than behind floats (layouts that kernels give cost
    it) is a cost of the conversions between.

    >>> unit = SearchUnit("fc", "Linear", ("fc",), (Option("int8", {"time": 3.0}, "integers"),))
    >>> retimed(Problem((unit,)), (0,), [2.0]).total((0,), "time")
    2.0
    """
    own = problem.columns("time")
    starts = [0, *itertools.accumulate(len(unit.options) for unit in problem.units)]
    from_integers: dict[int, list[int]] = {}
    for place, value in enumerate(problem.values, starts[-1] + len(problem.values)):
        if value.producer is not None and problem.option(picks, value.producer).gives != FLOAT:
            for reader in value.readers:
                if reader is not None:
                    from_integers.setdefault(reader, []).append(place)
    for unit, time in enumerate(times):
        column = starts[unit] + picks[unit]
        if time is None:
            continue
        if problem.option(picks, unit).takes == INTEGERS:
            own[column] = time
        for place in (
            from_integers.get(unit, ()) if problem.option(picks, unit).takes == FLOAT else ()
        ):
            own[place] = max(0.0, own[place] + (time - own[column]) / len(from_integers[unit]))
    return _with(problem, "time", own)


def _with(problem: Problem, figure: str, columns: Any) -> Problem:
    values = iter(columns.tolist())
    units = [
        replace(
            unit,
            options=tuple(
                replace(option, figures={**option.figures, figure: next(values)})
                for option in unit.options
            ),
        )
        for unit in problem.units
    ]
    passed = list(problem.values)
    quantize = [next(values) for _ in passed]
    dequantize = [next(values) for _ in passed]
    losses = [next(values) for _ in passed]
    if figure == "time":
        passed = [
            replace(value, quantize=q, dequantize=d)
            for value, q, d in zip(passed, quantize, dequantize, strict=True)
        ]
    if figure == "loss":
        passed = [replace(value, loss=loss) for value, loss in zip(passed, losses, strict=True)]
    base = {**problem.base, figure: next(values)}
    return replace(problem, units=tuple(units), values=tuple(passed), base=base)
