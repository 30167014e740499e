"""How a combination is measured: beside the float model, whose time says how fast the machine is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backquant.accuracy.search import loop as trials
from backquant.accuracy.search.loop import Bench
from backquant.accuracy.search.programme import Option, Problem, SearchUnit


class _Model(nn.Module):
    """Takes as long as it says; the machine is slower by a factor."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Runner:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def clock(self, run: Any) -> float:
        return float(run.func.seconds * self.factor)

    def runnable(self, made: Any) -> Any:
        return made

    def by_node(self, made: Any, example: Any, speed: float = 1.0) -> dict[str, float]:
        return {"fc": 2.0 * self.factor * speed, "act": 1.0 * self.factor * speed}


PROBLEM = Problem(
    (
        SearchUnit(
            "fc",
            "Linear",
            ("fc",),
            (Option("float", {"time": 9e3}), Option("integers", {"time": 3e3})),
            frozenset({"fc", "act"}),
        ),
    ),
    base={"time": 1e3},
    in_float=9.5e3,
)


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_a_prediction_is_for_the_machine_as_fast_as_it_is(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "WHOLE_SECONDS", 0.0)
    runner: Any = _Runner(factor)
    x = torch.ones(1)
    bench = Bench(_Model(9.5e-3), runner, x, [x], None, 1.0)
    made: Any = _Model(4.2e-3)
    found = bench.trial(PROBLEM, (1,), made)
    assert found.ms == pytest.approx(4.2 * factor)
    assert found.predicted_ms == pytest.approx(4.0 * factor)
    assert found.unit_us == (pytest.approx(3.0),)  # as when the parts were timed


def test_in_float_as_a_whole_it_is_the_model_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the sum of the parts, which is 10 ms here."""
    monkeypatch.setattr(trials, "WHOLE_SECONDS", 0.0)
    runner: Any = _Runner(1.0)
    x = torch.ones(1)
    made: Any = _Model(9.5e-3)
    found = Bench(made, runner, x, [x], None, 1.0).trial(PROBLEM, (0,), made)
    assert found.predicted_ms == pytest.approx(9.5)
