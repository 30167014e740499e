"""A search as a self-contained page: the Pareto front, what was tried, what each operator became."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from backquant.accuracy.figures import decibel_text, decibels
from backquant.accuracy.search.result import SearchResult
from backquant.accuracy.search.text import (
    ROW_HEADS,
    TRIAL_HEADS,
    answer,
    cells,
    combination_name,
    row_cells,
)
from backquant.report.template import page_template

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
        ("outputs", decibel_text(decibels(best.loss)), f"{len(found.trials)} combinations")
    )
    if best.metric is not None:
        cards.append(("metric", f"{best.metric:.5g}", f"{found.in_float:.5g} in float"))
    if best.ms is not None and best.float_ms is not None:
        cards.append(("one call", f"{best.ms:.3g} ms", f"{best.float_ms:.3g} ms in float"))
    cards.append(("weights", f"{best.bytes / 1e6:.3g} MB", f"{best.bitops:.3g} bit-operations"))
    plot = _Plot(found)
    trials = [
        (
            combination_name(found, trial),
            "missed" if trial.misses(found.budget) else "kept",
            *cells(trial),
        )
        for trial in found.trials
    ]
    return page_template("accuracy.search", "accuracy").render(
        title=found.model.record.model or "model",
        backend=found.model.backend_config.name,
        budget=str(found.budget),
        answer=answer(found),
        cards=cards,
        hindrance=found.hindrance,
        stopped=found.stopped,
        plot=plot.drawn(),
        limits=list(plot.limits()),
        tables=[
            ("What each operator became", ROW_HEADS, [row_cells(row) for row in found.rows], 3),
            ("What was tried", TRIAL_HEADS, trials, 2),
        ],
    )


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

    def drawn(self) -> dict[str, Any]:
        found = self.found
        return {
            "width": _WIDTH,
            "height": _HEIGHT,
            "left": _LEFT,
            "right": _RIGHT,
            "top": _TOP,
            "bottom": _BOTTOM,
            "x_name": "milliseconds of one call" if self.is_timed else "bit-operations",
            "x_ticks": [(self.x(cost), f"{cost:.3g}") for cost in round_ticks(0.0, self.most)],
            "y_ticks": [
                (self.y(level), f"{level:g}") for level in round_ticks(self.low, self.high)
            ],
            "line": " ".join(f"{self.x(cost)},{self.y(level)}" for cost, level in self.front),
            "dots": [
                {
                    "x": self.x(cost),
                    "y": self.y(level),
                    "kept": not trial.misses(found.budget),
                    "best": trial.picks == found.best.picks,
                    "tip": f"{combination_name(found, trial)}: {', '.join(filter(None, cells(trial)))}",
                }
                for trial, (cost, level) in zip(found.trials, self.trials, strict=True)
            ],
        }

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
