"""What a search found: the model, whether it keeps to the budget, and what was tried."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from backquant.accuracy.comparison import finite
from backquant.accuracy.figures import decibel_text, decibels
from backquant.accuracy.search.loop import FrontPoint, Loop, Trial
from backquant.accuracy.search.programme import Option, Problem, SearchUnit
from backquant.accuracy.search.runners import Budget
from backquant.match.plan import Reason
from backquant.pages import Card, Document, Drawing, Note, Part, Section, Shown, Table
from backquant.pages.markup import Element, tag
from backquant.reason_codes import ReasonCode
from backquant.runtime import QuantizedModel

# The figure of a search: what was tried, and the best that can be chosen, by cost and SQNR.

_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 860.0, 34.0, 340.0
_WIDTH, _HEIGHT = 900, 390
_FAR = 3  # times of all that was found: a limit so large is not drawn
_TOP_LEVEL = 90.0  # dB: what is better stands at the top
_TICKS = 7  # at most, and as many less as make them round


@dataclass(frozen=True)
class Dot:
    """A combination that was measured. ``level``: its SQNR in dB."""

    cost: float
    level: float
    tip: str
    kept: bool
    best: bool


class ParetoPlot:
    """Cost against SQNR; what has no error stands at the top.

    ``front``: (cost, SQNR) of what is predicted; ``costs`` and ``level``: what the budget allows.
    """

    def __init__(
        self,
        what: str,
        front: Sequence[tuple[float, float]],
        dots: Sequence[Dot],
        costs: Sequence[float],
        level: float | None,
    ) -> None:
        self.what, self.front, self.dots, self.level = what, sorted(front), dots, level
        points = [*front, *((dot.cost, dot.level) for dot in dots)]
        levels = [level for _, level in points if math.isfinite(level)] or [0.0, 60.0]
        levels += [] if level is None else [level]
        low, high = (min(limit(levels), _TOP_LEVEL) for limit in (min, max))
        self.low, self.high = math.floor(low) - 1, math.ceil(high) + 3
        most = max((cost for cost, _ in points), default=1.0) or 1.0
        self.costs = [cost for cost in costs if cost <= _FAR * most]
        self.most = 1.08 * max([most, *self.costs])

    def svg(self) -> Element:
        """The figure."""
        return tag(
            "svg",
            *self._axes(),
            *self._limits(),
            *self._marks(),
            viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
            role="img",
            aria_label=f"Pareto front of {self.what} and SQNR",
        )

    def _x(self, cost: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * min(cost / self.most, 1.0), 1)

    def _y(self, level: float) -> float:
        share = (min(max(level, self.low), self.high) - self.low) / (self.high - self.low)
        return round(_BOTTOM - (_BOTTOM - _TOP) * share, 1)

    def _axes(self) -> Iterator[Element]:
        """Lines of the grid with their numbers, and the names of both axes."""
        for cost in round_ticks(0.0, self.most):
            x = self._x(cost)
            yield tag("line", class_="gridline", x1=x, y1=_TOP, x2=x, y2=_BOTTOM)
            yield tag("text", f"{cost:.3g}", x=x, y=_BOTTOM + 18, text_anchor="middle")
        for level in round_ticks(self.low, self.high):
            y = self._y(level)
            yield tag("line", class_="gridline", x1=_LEFT, y1=y, x2=_RIGHT, y2=y)
            yield tag("text", f"{level:g}", x=_LEFT - 8, y=y + 4, text_anchor="end")
        yield tag("text", self.what, x=_RIGHT, y=_BOTTOM + 36, text_anchor="end")
        yield tag("text", "SQNR of the outputs, dB", x=_LEFT, y=_TOP - 10)

    def _limits(self) -> Iterator[Element]:
        """Lines of the budget."""
        for x in map(self._x, self.costs):
            yield tag("line", class_="limit", x1=x, y1=_TOP, x2=x, y2=_BOTTOM)
        if self.level is not None:
            y = self._y(self.level)
            yield tag("line", class_="limit", x1=_LEFT, y1=y, x2=_RIGHT, y2=y)

    def _marks(self) -> Iterator[Element]:
        """The front, and what was tried."""
        line = " ".join(f"{self._x(cost)},{self._y(level)}" for cost, level in self.front)
        yield tag("polyline", class_="front", points=line)
        for dot in self.dots:
            x, y, kind = self._x(dot.cost), self._y(dot.level), "kept" if dot.kept else "missed"
            yield tag("circle", tag("title", dot.tip), class_=kind, cx=x, cy=y, r=5)
            if dot.best:
                yield tag("circle", class_="best", cx=x, cy=y, r=10)


def round_ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between two values.

    >>> round_ticks(-5, 93), round_ticks(0.0, 7.52)
    ([0.0, 20.0, 40.0, 60.0, 80.0], [0.0, 2.0, 4.0, 6.0])
    """
    least = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= least)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [float(f"{place * step:.6g}") for place in range(first, last + 1)]


_TRIALS = "combination, budget, #SQNR, #metric, #predicted, #measured, #speed"
_HOW_TO_READ = (
    "Line: the best that can be chosen, as predicted after all corrections. Dots: combinations that "
    "were made and measured; filled ones keep to the budget, the circle is the answer, dashes are the "
    "budget. Combinations without any error are drawn at the top."
)


@dataclass(frozen=True)
class ChosenOption:
    """What one unit became, and why. ``sqnr``: of the outputs when it alone is on integers.

    Times in microseconds; ``None`` where none are measured.
    """

    name: str
    operator: str
    nodes: tuple[str, ...]
    option: str
    sqnr: float
    chosen_us: float | None
    float_us: float | None
    why: str


@dataclass(frozen=True)
class SearchResult(Shown):
    """The best model that a search found; print it, or use ``to_dict`` and ``save_html``.

    ``model``: an ordinary quantized model; ``best``: its measured figures. ``met``: whether they keep to
    the budget; if not, ``hindrance`` says what stands in the way. ``in_float``: the metric of the float
    model. ``front``: the predicted Pareto front, the least time (or bit-operations) for each error.
    ``stopped``: what ended the search before it was done: ctrl-C, or the error of one combination.
    ``seconds``: duration of the calibration and of the whole search.
    """

    model: QuantizedModel
    budget: Budget
    met: bool
    best: Trial
    trials: tuple[Trial, ...]
    front: tuple[FrontPoint, ...] = ()
    rows: tuple[ChosenOption, ...] = ()
    hindrance: str = ""
    in_float: float | None = None
    stopped: str = ""
    places: tuple[int, ...] = ()  # of ``rows`` among the picks of a trial
    seconds: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the model."""
        data: dict[str, Any] = finite(
            {
                "backend": self.model.backend_config.name,
                "budget": self.budget.to_dict(),
                "met": self.met,
                "hindrance": self.hindrance,
                "stopped": self.stopped,
                "metric_in_float": self.in_float,
                "best": self.best.to_dict(),
                "trials": [trial.to_dict() for trial in self.trials],
                "front": [asdict(point) for point in self.front],
                "chosen": [asdict(row) for row in self.rows],
                "seconds": self.seconds,
            }
        )
        return data

    @property
    def interrupted(self) -> bool:
        """Whether something ended the search before it was done."""
        return bool(self.stopped)

    def document(self) -> Document:
        """The answer, what was tried, and what each operator became."""
        backend, word = self.model.backend_config.name, "kept" if self.met else "NOT kept"
        stopped = " (stopped before its end)" if self.stopped else ""
        in_float = sum(row.option == "float" for row in self.rows)
        trials = [(self._name(one), self._kept(one), *_measured(one)) for one in self.trials]
        rows = [(f"{row.name}  {row.operator}", row.option, row.why) for row in self.rows]
        floats = [row for row, unit in zip(rows, self.rows, strict=True) if unit.option == "float"]
        heads = "operator, became, why"
        return Document(
            title=self.model.record.model or "model",
            about=f"on {backend}: search within {self.budget}",
            headline=f"{backend}, {self.budget}: {word}{stopped}",
            tone="" if self.met else "bad",
            cards=list(self._cards()),
            parts=[
                Section("What accuracy costs", self._front(), in_text=False),
                Section("What was tried", [Table.of(_TRIALS, trials)]),
                Section("What each operator became", [Table.of(heads, rows)], in_text=False),
                Section(
                    f"{in_float} of {len(rows)} operators stay float" if rows else "",
                    [Table.of(heads, floats)],
                ),
            ],
        )

    def _cards(self) -> Iterator[Card]:
        best = self.best
        yield Card("SQNR", decibel_text(decibels(best.loss)), "(higher is better)")
        if best.metric is not None and self.in_float is not None:
            yield Card("metric", f"{best.metric:.6g}", f"({self.in_float:.6g} in float)")
        if best.ms is not None and best.float_ms is not None:
            speed = f"({best.float_ms / best.ms:.2f} times as fast as float)"
            yield Card("one call", f"{best.ms:.3g} ms", speed)
        yield Card("weights", f"{best.bytes / 1e6:.3g} MB", f"({best.bitops:.3g} bit-operations)")
        if self.hindrance:
            yield Card("in the way", "", self.hindrance)
        if self.stopped:
            yield Card("stopped", "", self.stopped)

    def _name(self, trial: Trial) -> str:
        """What a trial is called: how much of it is quantized, and whether it is the answer."""
        mark = "→ " if trial.picks == self.best.picks else ""
        picks = [trial.picks[place] for place in self.places] or trial.picks
        return f"{mark}{sum(map(bool, picks))} of {len(picks)} operators quantized"

    def _kept(self, trial: Trial) -> str:
        return "missed" if trial.misses(self.budget) else "kept"

    def _front(self) -> list[Part]:
        timed = self.best.ms is not None
        what = "milliseconds of one call" if timed else "bit-operations"
        front = [_point(one, timed) for one in self.front]
        dots = [
            Dot(
                *_point(one, timed),
                tip=f"{self._name(one)}: {', '.join(filter(None, _measured(one)))}",
                kept=not one.misses(self.budget),
                best=one.picks == self.best.picks,
            )
            for one in self.trials
        ]
        limits = self._times() if timed else []
        plot = ParetoPlot(what, front, dots, limits, self.budget.min_sqnr)
        return [Note(_HOW_TO_READ), Drawing(plot.svg())]

    def _times(self) -> list[float]:
        """Milliseconds that the budget allows."""
        times = [] if self.budget.max_ms is None else [self.budget.max_ms]
        if self.budget.max_ratio is not None and self.best.float_ms is not None:
            times.append(self.budget.max_ratio * self.best.float_ms)
        return times


def _point(one: Trial | FrontPoint, timed: bool) -> tuple[float, float]:
    """Cost and SQNR."""
    return float((one.ms or 0.0) if timed else one.bitops), decibels(one.loss)


def _measured(trial: Trial) -> tuple[str, ...]:
    """The cells of a trial, under ``_TRIALS`` after the first two."""
    return (
        decibel_text(decibels(trial.loss)),
        "" if trial.metric is None else f"{trial.metric:.6g}",
        "" if trial.predicted_ms is None else f"{trial.predicted_ms:.3g} ms",
        "" if trial.ms is None else f"{trial.ms:.3g} ms",
        "" if trial.ms is None or trial.float_ms is None else f"{trial.float_ms / trial.ms:.2f} ×",
    )


def chosen_rows(problem: Problem, trial: Trial) -> tuple[ChosenOption, ...]:
    """What each unit with operators of the plan became."""
    pairs = zip(problem.units, trial.picks, strict=True)
    return tuple(_row(unit, unit.options[pick]) for unit, pick in pairs if unit.nodes)


def _row(unit: SearchUnit, chosen: Option) -> ChosenOption:
    in_float, *others = unit.options
    quantized = chosen if chosen is not in_float else next(iter(others), chosen)
    is_timed = any(option.figures.get("time") for option in unit.options)
    return ChosenOption(
        unit.name,
        unit.operator,
        unit.nodes,
        chosen.name,
        decibels(quantized.figures["loss"]),
        chosen.figures["time"] if is_timed else None,
        in_float.figures["time"] if is_timed else None,
        why(unit, chosen, quantized, is_timed),
    )


def why(unit: SearchUnit, chosen: Option, quantized: Option, is_timed: bool) -> str:
    """Why a unit is what it is, in words; ``quantized``: the option that float stands against."""
    in_float = unit.options[0]
    costs = f"SQNR {decibel_text(decibels(quantized.figures['loss']))} alone"
    if not is_timed:
        return f"on integers: {costs}"
    saved = in_float.figures["time"] - quantized.figures["time"]
    if saved <= 0:
        word = "slower" if chosen is in_float else "among integers, though slower"
        return f"{quantized.name}: {word} by {-saved:.1f} µs, {costs}"
    return f"{quantized.name}: saves {saved:.1f} µs, {costs}"


def hindrance_of(loop: Loop, trial: Trial) -> str:
    """What stands in the way of a budget that was missed; empty where it was kept."""
    missed = trial.misses(loop.budget)
    if not missed:
        return ""
    said = loop.budget.to_dict()
    parts = [f"{name} {said[name]:g} is not kept: {value:.4g}" for name, value in missed.items()]
    problem = loop.current()
    if {"max_ms", "max_ratio"} & missed.keys():
        outside = problem.base.get("time", 0.0) / 1e3
        parts.append(f"{outside:.3g} ms are outside of all that can be quantized")
        parts.append(f"most time: {_most(problem, trial, 'time')}")
    if {"max_bytes", "max_bitops"} & missed.keys():
        figure = "bytes" if "max_bytes" in missed else "bitops"
        parts.append(f"the most {figure}: {_most(problem, trial, figure)}")
    if {"max_drop", "min_sqnr"} & missed.keys():
        parts.append(f"most error: {_most(problem, trial, 'loss')}")
    return "; ".join(parts)


def _most(problem: Problem, trial: Trial, figure: str) -> str:
    found: list[tuple[float, str]] = sorted(
        (
            (
                unit.options[pick].figures.get(figure, 0.0),
                f"{unit.name} ({unit.options[pick].name})",
            )
            for unit, pick in zip(problem.units, trial.picks, strict=True)
            if unit.nodes
        ),
        reverse=True,
    )
    return ", ".join(name for value, name in found[:3] if value > 0) or "nothing that is chosen"


def told(budget: Budget, trial: Trial, trials: Sequence[Trial], in_float: float | None) -> str:
    """One sentence for the report of the model."""
    words = [f"search within {budget}: {decibel_text(decibels(trial.loss))}"]
    if trial.metric is not None and in_float is not None:
        words.append(f"metric {trial.metric:.6g}, {in_float:.6g} in float")
    if trial.ms is not None and trial.float_ms is not None:
        words.append(f"{trial.ms:.3g} ms, {trial.float_ms:.3g} ms in float")
    words.append(f"the best of {len(trials)} combinations that were measured")
    kept = "kept" if not trial.misses(budget) else "NOT kept"
    return ", ".join(words) + f"; the budget is {kept}"


def reason_of(why: str, budget: Budget) -> Reason:
    """Why an operator is left in float.

    >>> reason_of("integers: slower by 2.0 µs", Budget(max_ms=1)).admitted
    'float, within max_ms 1'
    """
    return Reason(
        "",
        ReasonCode.SEARCH,
        why,
        f"float, within {budget}",
        fix="another budget; see docs/accuracy.md",
        place="measured by backquant.search",
    )
