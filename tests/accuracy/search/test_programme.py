from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

import pytest
from tests.snapshots import compare as snapshot

from backquant.accuracy.search.programme import (
    Option,
    Passed,
    Problem,
    SearchUnit,
    corrected,
    retimed,
    solve,
)
from backquant.errors import MissingExtraError


def drawn(made: random.Random) -> Problem:
    """Five units in a graph, each with three options of all kinds."""
    units = []
    for name in "abcde":
        gives = made.choice(["integers", "either"])
        options = (
            Option("float", {"time": made.uniform(1, 9), "loss": 0.0}),
            Option("int8", {"time": made.uniform(1, 9), "loss": made.random()}, "integers", gives),
            Option("dynamic", {"time": made.uniform(1, 9), "loss": made.random() / 2}),
        )
        units.append(SearchUnit(name, "Linear", (name,), options))
    values = []
    for _ in range(6):
        producer = made.choice([None, 0, 1, 2])
        readers = tuple(dict.fromkeys(made.choice([None, 3, 4]) for _ in range(3)))
        values.append(
            Passed(producer, readers, made.uniform(0, 4), made.uniform(0, 4), made.random() / 4)
        )
    return Problem(tuple(units), tuple(values), {"time": 1.0})


def test_the_answer_is_that_of_trying_everything() -> None:
    made = random.Random(0)
    for _ in range(10):
        problem, limit = drawn(made), made.uniform(0.2, 2)
        found = solve(problem, "time", {"loss": limit})
        wholes = itertools.product(range(3), repeat=5)
        within = [picks for picks in wholes if problem.total(picks, "loss") <= limit + 1e-9]
        best = min(problem.total(picks, "time") for picks in within)
        assert found is not None
        assert problem.total(found, "loss") <= limit + 1e-6
        assert problem.total(found, "time") == pytest.approx(best, rel=2e-3)


def test_wholes_correct_their_parts() -> None:
    problem = drawn(random.Random(1))
    true = problem.columns("loss") * [
        1.0 + 0.1 * (i % 5) for i in range(len(problem.columns("loss")))
    ]
    picks = [tuple((i + j) % 3 for i in range(5)) for j in range(3)]
    measured = {p: float(true @ problem.chosen(p)) for p in picks}
    better = corrected(problem, "loss", measured, 0.01)
    for p in picks:
        assert better.total(p, "loss") == pytest.approx(measured[p], rel=0.03)
        before = abs(problem.total(p, "loss") - measured[p])
        assert abs(better.total(p, "loss") - measured[p]) <= before


def test_what_float_takes_more_behind_integers_is_a_cost_of_the_conversion() -> None:
    options = Option("float", {"time": 5.0}), Option("int8", {"time": 2.0}, "integers", "integers")
    units = tuple(SearchUnit(name, "Linear", (name,), options) for name in "ab")
    problem = Problem(units, (Passed(0, (1,), 1.0, 1.0),))
    found = retimed(problem, (1, 0), [1.5, 9.0])
    assert found.total((1, 0), "time") == pytest.approx(1.5 + 1.0 + 9.0)
    assert found.total((0, 0), "time") == 10.0


def test_without_scipy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingExtraError) as error:
        solve(drawn(random.Random(0)), "time", {})
    snapshot(Path(__file__), "no_scipy", str(error.value))
