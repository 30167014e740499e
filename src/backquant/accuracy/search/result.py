"""What a search found: the model, whether it keeps to the budget, and what was tried."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from backquant.accuracy.comparison import finite
from backquant.accuracy.figures import decibel_text, decibels
from backquant.accuracy.search.budget import Budget
from backquant.accuracy.search.loop import FrontPoint, Loop
from backquant.accuracy.search.programme import Option, Problem, SearchUnit
from backquant.accuracy.search.trials import Trial
from backquant.files import write_text
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode
from backquant.runtime import QuantizedModel


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
class SearchResult:
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

    def __str__(self) -> str:
        from backquant.accuracy.search.text import renderable
        from backquant.report.text import render

        return render(renderable(self))

    def to_html(self) -> str:
        """One self-contained page that works offline."""
        from backquant.accuracy.search.html import search_page

        return search_page(self)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write the page to ``path`` (under a temporary name first); ``UsageError`` where it cannot be."""
        write_text(path, self.to_html(), "save_html(path)")


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
