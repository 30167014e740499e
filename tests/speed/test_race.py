from __future__ import annotations

import pytest
import torch
from torch import nn

from backquant.speed import against_float as races
from backquant.speed.against_float import Race, race


def test_what_one_fast_call_says_decides_nothing() -> None:
    """The clock of a busy machine: one lucky call, or many unlucky ones."""
    assert Race(((2.0, 2.0, 2.0), (1.0, 1.0, 1.0))).is_slower(0, 1, 1.03)
    assert not Race(((2.0, 1.0, 1.0), (1.0, 1.0, 1.0))).is_slower(0, 1, 1.03)
    assert not Race(((1.0, 2.0, 2.0), (1.0, 1.0, 1.0))).is_slower(0, 1, 1.03)
    assert not Race(((1.0, 1.0, 1.0), (1.0, 0.5, 1.0))).is_slower(0, 1, 1.03)
    assert not Race(((2e-6,) * 3, (1e-6,) * 3)).is_slower(0, 1, 1.03)


def test_models_take_turns() -> None:
    order = []

    def clock(run: object) -> float:
        order.append(run.func)  # type: ignore[attr-defined]
        return 1.0

    one, other = nn.ReLU(), nn.Tanh()
    result = race([one, other], torch.zeros(1), clock)
    assert order[:4] == [one, other, one, other]
    assert len(result.turns[0]) == len(result.turns[1]) >= 3


def test_what_was_called_before_is_warm() -> None:
    first, second, called = nn.ReLU(), nn.Tanh(), []
    for model in (first, second):
        model.register_forward_hook(lambda module, args, out: called.append(module))
    race([first, second], torch.zeros(1), lambda run: 1.0, warm=1)
    assert called == [second]


@pytest.mark.parametrize(("seconds", "turns"), [(0.3, 3), (1.2, 2)])
def test_calls_of_seconds_take_two_turns(
    monkeypatch: pytest.MonkeyPatch, seconds: float, turns: int
) -> None:
    now = [0.0]

    def clock(run: object) -> float:
        now[0] += seconds
        return seconds

    monkeypatch.setattr(races.time, "perf_counter", lambda: now[0])
    result = race([nn.ReLU(), nn.Tanh()], torch.zeros(1), clock)
    assert len(result.turns[0]) == len(result.turns[1]) == turns


@pytest.mark.parametrize(
    ("times", "turns"),
    [
        ((0.02, 0.01), 2),  # far apart
        ((0.01, 0.02), 2),
        ((0.014, 0.01), 3),  # clear, after three of many turns
        ((0.01005, 0.01), 3),  # as clear: next to nothing
        ((0.0104, 0.01), 13),  # near three percent: all that a quarter of a second holds
        ((2.0, 1.0), 1),
        ((1.1, 1.0), 2),
    ],
)
def test_a_clear_race_ends(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, float], turns: int
) -> None:
    now, (one, other) = [0.0], (nn.ReLU(), nn.Tanh())
    seconds = {id(one): times[0], id(other): times[1]}

    def clock(run: object) -> float:
        taken = seconds[id(run.func)]  # type: ignore[attr-defined]
        now[0] += taken
        return taken

    monkeypatch.setattr(races.time, "perf_counter", lambda: now[0])
    result = race([one, other], torch.zeros(1), clock, decides=True)
    assert len(result.turns[0]) == turns
