"""A search as a self-contained page: the Pareto front, what was tried, what each operator became."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from backquant.accuracy.figures import decibel_text, decibels
from backquant.accuracy.html import FOOTER, column_class, heading, ranking
from backquant.accuracy.search.result import SearchResult
from backquant.accuracy.search.text import (
    ROW_HEADS,
    TRIAL_HEADS,
    cells,
    combination_name,
    row_cells,
)
from backquant.markup import Assets, Element, page, tag

_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 860.0, 34.0, 340.0
_WIDTH, _HEIGHT = 900, 390
_FAR = 3  # times of all that was found: a limit so large is not drawn
_TOP_LEVEL = 90.0  # dB: what is better stands at the top
_TICKS = 7  # at most, and as many less as make them round


def search_page(found: SearchResult) -> str:
    """The page, as text."""
    best = found.best
    cards = [("budget", "kept" if found.met else "NOT kept", str(found.budget))]
    cards.append(
        (
            "SQNR of the outputs (higher is better)",
            decibel_text(decibels(best.loss)),
            f"{len(found.trials)} combinations tried",
        )
    )
    if best.metric is not None:
        cards.append(("metric", f"{best.metric:.5g}", f"{found.in_float:.5g} in float"))
    if best.ms is not None and best.float_ms is not None:
        cards.append(("one call", f"{best.ms:.3g} ms", f"{best.float_ms:.3g} ms in float"))
    cards.append(("weights", f"{best.bytes / 1e6:.3g} MB", f"{best.bitops:.3g} bit-operations"))
    plot = _Plot(found)
    title = found.model.record.model or "model"
    backend = found.model.backend_config.name
    where = f"on {backend}: search within {found.budget}"
    return page(
        f"{title} on {backend}: search · backquant",
        Assets("accuracy", ("style.css", "search.css")),
        heading(title, where, cards, *_hindrances(found)),
        tag("main", *_front(plot), *_tables(found)),
        tag("footer", FOOTER),
    )


def _hindrances(found: SearchResult) -> Iterator[Element]:
    if found.hindrance:
        yield tag("p", f"In the way: {found.hindrance}", class_="panel hindrance")
    if found.stopped:
        yield tag("p", f"Stopped before its end: {found.stopped}", class_="panel hindrance")


def _front(plot: _Plot) -> Iterator[Element]:
    limits = list(plot.limits())
    dashes = ", dashes are the budget" if limits else ""
    yield tag("h2", "What accuracy costs")
    yield tag(
        "p",
        "Line: the best that can be chosen, as predicted after all corrections. Dots: combinations that were "
        f"made and measured; filled ones keep to the budget, the circle is the answer{dashes}. Combinations "
        "without any error are drawn at the top.",
        class_="soft",
    )
    lines = (tag("line", class_="limit", x1=a, y1=b, x2=c, y2=d) for a, b, c, d in limits)
    svg = tag(
        "svg",
        *plot.axes(),
        *lines,
        *plot.marks(),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_label=f"Pareto front of {plot.x_name} and SQNR",
    )
    yield tag("div", svg, class_="panel plot")


def _tables(found: SearchResult) -> Iterator[Element]:
    trials = [
        (
            combination_name(found, trial),
            "missed" if trial.misses(found.budget) else "kept",
            *cells(trial),
        )
        for trial in found.trials
    ]
    for title, heads, rows, words in (
        ("What each operator became", ROW_HEADS, [row_cells(row) for row in found.rows], 3),
        ("What was tried", TRIAL_HEADS, trials, 2),
    ):
        lines = (
            tag("tr", *(tag("td", c, class_=column_class(at, words)) for at, c in enumerate(row)))
            for row in rows
        )
        yield tag("h2", title)
        yield ranking(heads, lines, words)


class _Plot:
    """Time (or bit-operations) against SQNR; what has no error stands at the top."""

    def __init__(self, found: SearchResult) -> None:
        self.found = found
        self.is_timed = found.best.ms is not None
        front = [(self._cost(point), decibels(point.loss)) for point in found.front]
        trials = [(self._cost(trial), decibels(trial.loss)) for trial in found.trials]
        levels = [level for _, level in front + trials if math.isfinite(level)] or [0.0, 60.0]
        levels += [] if found.budget.min_sqnr is None else [found.budget.min_sqnr]
        low, high = (min(limit(levels), _TOP_LEVEL) for limit in (min, max))
        self.low, self.high = math.floor(low) - 1, math.ceil(high) + 3
        most = max((cost for cost, _ in front + trials), default=1.0) or 1.0
        self.times = [time for time in self._times() if time <= _FAR * most]
        self.most = 1.08 * max([most, *self.times])
        self.front, self.trials = sorted(front), trials

    def _cost(self, point: Any) -> float:
        return float((point.ms or 0.0) if self.is_timed else point.bitops)

    def x(self, cost: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * min(cost / self.most, 1.0), 1)

    def y(self, level: float) -> float:
        share = (min(max(level, self.low), self.high) - self.low) / (self.high - self.low)
        return round(_BOTTOM - (_BOTTOM - _TOP) * share, 1)

    @property
    def x_name(self) -> str:
        return "milliseconds of one call" if self.is_timed else "bit-operations"

    def axes(self) -> Iterator[Element]:
        """Lines of the grid with their numbers, and the names of both axes."""
        for cost in round_ticks(0.0, self.most):
            x = self.x(cost)
            yield tag("line", class_="grid", x1=x, y1=_TOP, x2=x, y2=_BOTTOM)
            yield tag("text", f"{cost:.3g}", x=x, y=_BOTTOM + 18, text_anchor="middle")
        for level in round_ticks(self.low, self.high):
            y = self.y(level)
            yield tag("line", class_="grid", x1=_LEFT, y1=y, x2=_RIGHT, y2=y)
            yield tag("text", f"{level:g}", x=_LEFT - 8, y=y + 4, text_anchor="end")
        yield tag("text", self.x_name, x=_RIGHT, y=_BOTTOM + 36, text_anchor="end")
        yield tag("text", "SQNR of the outputs, dB", x=_LEFT, y=_TOP - 10)

    def marks(self) -> Iterator[Element]:
        """The front, and what was tried."""
        found = self.found
        line = " ".join(f"{self.x(cost)},{self.y(level)}" for cost, level in self.front)
        yield tag("polyline", class_="front", points=line)
        for trial, (cost, level) in zip(found.trials, self.trials, strict=True):
            x, y = self.x(cost), self.y(level)
            tip = f"{combination_name(found, trial)}: {', '.join(filter(None, cells(trial)))}"
            kept = "missed" if trial.misses(found.budget) else "kept"
            yield tag("circle", tag("title", tip), class_=kept, cx=x, cy=y, r=5)
            if trial.picks == found.best.picks:
                yield tag("circle", class_="best", cx=x, cy=y, r=10)

    def _times(self) -> list[float]:
        """Milliseconds that the budget allows."""
        budget = self.found.budget
        if not self.is_timed:
            return []
        times = [budget.max_ms] if budget.max_ms is not None else []
        if budget.max_ratio is not None and self.found.best.float_ms is not None:
            times.append(budget.max_ratio * self.found.best.float_ms)
        return times

    def limits(self) -> Iterator[tuple[float, float, float, float]]:
        """Lines of the budget, where it is one of time or SQNR."""
        budget = self.found.budget
        for time in self.times:
            yield self.x(time), _TOP, self.x(time), _BOTTOM
        if budget.min_sqnr is not None:
            yield _LEFT, self.y(budget.min_sqnr), _RIGHT, self.y(budget.min_sqnr)


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
