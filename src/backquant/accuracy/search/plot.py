"""The figure of a search: what was tried, and the best that can be chosen, by cost and SQNR."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from backquant.pages.markup import Element, tag

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
