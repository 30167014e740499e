"""The strategy, on wholes whose figures are known: those of their parts, times what parts do not tell."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from backquant.accuracy.search.loop import Loop, Trial, front_of
from backquant.accuracy.search.programme import Option, Picks, Problem, SearchUnit
from backquant.accuracy.search.result import chosen_rows, hindrance_of
from backquant.accuracy.search.runners import Budget

LOSSES = (0.004, 0.002, 0.001, 0.0005, 0.00025, 0.0001)
SAVED = (50.0, 40.0, 30.0, 20.0, 10.0, -5.0)


def problem() -> Problem:
    units = []
    for i, (loss, saved) in enumerate(zip(LOSSES, SAVED, strict=True)):
        size = {"bytes": 400.0, "bitops": 1024.0}
        in_float = Option("float", {"loss": 0.0, "time": 100.0, **size})
        figures = {"loss": loss, "time": 100.0 - saved, "bytes": 100.0, "bitops": 64.0}
        units.append(
            SearchUnit(f"layer{i}", "Linear", (f"n{i}",), (in_float, Option("integers", figures)))
        )
    return Problem(tuple(units), base={"time": 50.0, "bytes": 100.0, "bitops": 0.0})


def measured(told: Problem, picks: Picks) -> Trial:
    """All wholes lose 30 % more and take 10 % more than their parts say; the metric drops by ten errors."""
    whole = problem()
    loss, ms = 1.3 * whole.total(picks, "loss"), 1.1e-3 * whole.total(picks, "time")
    sizes = whole.total(picks, "bytes"), whole.total(picks, "bitops")
    predicted = told.total(picks, "loss"), 1e-3 * told.total(picks, "time")
    return Trial(
        picks, predicted[0], loss, *sizes, predicted[1], ms, 0.715, 0.9 - 10 * loss, 10 * loss
    )


def searched(**limits: float) -> tuple[Loop, Trial]:
    loop = Loop(problem(), Budget.of(limits), measured)
    loop.run_ends()
    loop.run()
    best = loop.best()
    assert best is not None
    return loop, best


@pytest.mark.parametrize(
    "limits",
    [
        {"max_drop": 0.02},
        {"max_drop": 0.0},
        {"max_drop": 0.04, "max_bytes": 1700},
        {"min_sqnr": 25.0},
        {"max_ms": 0.6},
        {"max_ratio": 0.8},
        {"max_bytes": 1400},
        {"max_bitops": 3000},
    ],
)
def test_the_budget_is_kept(limits: dict[str, float]) -> None:
    loop, best = searched(**limits)
    assert not best.misses(loop.budget) and hindrance_of(loop, best) == ""
    assert len(loop.trials) <= 10


def test_the_answer_is_nearly_the_best_there_is() -> None:
    budget = Budget(max_drop=0.02)
    wholes = [measured(problem(), picks) for picks in itertools.product((0, 1), repeat=6)]
    best = min(trial.ms or 0.0 for trial in wholes if not trial.misses(budget))
    _, found = searched(max_drop=0.02)
    assert found.ms is not None and found.ms <= 1.05 * best
    last = [t for t in searched(max_ms=0.6)[0].trials if t.predicted_ms and t.ms][-1]
    assert last.ms == pytest.approx(last.predicted_ms, rel=0.1)


def test_trials_are_compared_beside_the_float_model() -> None:
    """One that was timed while other programs ran took longer, and so did the float model beside it."""
    told = problem()
    quiet, busy = measured(told, (0,) * len(told.units)), measured(told, (1,) * len(told.units))
    assert quiet.ms is not None and busy.ms is not None
    quiet = replace(quiet, ms=1.0, float_ms=1.0)
    busy = replace(busy, ms=1.5, float_ms=3.0)
    loop = Loop(told, Budget(max_drop=1.0), lambda _, picks: busy, trials=[quiet, busy])
    assert loop.best() is busy


def test_a_budget_that_cannot_be_kept_says_what_is_in_the_way() -> None:
    loop, best = searched(max_ms=0.2)
    assert set(best.misses(loop.budget)) == {"max_ms"}
    assert best.ms == min(trial.ms or 0.0 for trial in loop.trials)
    words = hindrance_of(loop, best)
    assert "max_ms 0.2 is not kept" in words and "outside of all that can be quantized" in words
    loop, best = searched(max_bytes=10)
    assert "layer" in hindrance_of(loop, best) and "max_bytes" in best.misses(loop.budget)


def test_what_is_stopped_has_the_best_so_far() -> None:
    loop = Loop(problem(), Budget(max_drop=0.02), measured)
    loop.run_ends()
    best = loop.best()
    assert best is not None and not best.misses(loop.budget)  # in float


def test_no_point_of_the_front_is_beaten() -> None:
    points = front_of(problem(), "time")
    assert len(points) > 3
    for one, other in itertools.pairwise(points):
        assert one.loss > other.loss and (one.ms or 0) <= (other.ms or 0)


def test_each_choice_has_its_reason() -> None:
    trial = replace(measured(problem(), (1, 0, 0, 0, 0, 0)), picks=(1, 0, 0, 0, 0, 0))
    first, second, *_, last = chosen_rows(problem(), trial)
    assert (first.option, first.why) == ("integers", "integers: saves 50.0 µs, SQNR 24.0 dB alone")
    assert second.why == "integers: saves 40.0 µs, SQNR 27.0 dB alone"
    assert last.why == "integers: slower by 5.0 µs, SQNR 40.0 dB alone"
