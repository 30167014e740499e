from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backquant.runtime.replay import replays
from backquant.runtime.replay.replays import Fastest


class Clock:
    """Time that passes only where something takes it."""

    def __init__(self) -> None:
        self.now = 0.0

    def takes(
        self, seconds: Iterator[float] | float, name: str, calls: list[str]
    ) -> Callable[[Any], str]:
        def way(_: Any) -> str:
            calls.append(name)
            self.now += seconds if isinstance(seconds, float) else next(seconds)
            return name

        return way


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    clocks = {name: lambda: made.now for name in ("perf_counter", "thread_time")}
    monkeypatch.setattr(replays, "time", SimpleNamespace(**clocks))
    return made


@pytest.mark.parametrize(("seconds", "chosen"), [(0.5, 1), (0.99, 0), (2.0, 0)])
def test_ways_take_turns_and_then_the_fastest_stays(
    clock: Clock, seconds: float, chosen: int
) -> None:
    calls: list[str] = []
    both = Fastest([clock.takes(1.0, "whole", calls), clock.takes(seconds, "parts", calls)])
    for _ in range(8):
        assert both.chosen is None
        both([])
    assert calls == ["whole", "parts"] * 4
    assert both.chosen == chosen
    assert [both([]) for _ in range(3)] == [["whole", "parts"][chosen]] * 3


def test_the_first_round_and_a_disturbed_one_do_not_count(clock: Clock) -> None:
    calls: list[str] = []
    slow_at_first = clock.takes(iter([2.9, 0.5, 9.0, 0.5]), "parts", calls)
    both = Fastest([clock.takes(1.0, "whole", calls), slow_at_first])
    for _ in range(8):
        both([])
    assert both.chosen == 1


def test_another_number_of_threads_is_measured_anew(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    both = Fastest([clock.takes(1.0, "whole", calls), clock.takes(0.5, "parts", calls)])
    for _ in range(8):
        both([])
    assert both.chosen == 1
    before = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: before + 1)
    both([])
    assert both.chosen is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: before)
    assert both.chosen == 1


def test_what_is_several_times_as_slow_is_tried_twice(clock: Clock) -> None:
    calls: list[str] = []
    both = Fastest([clock.takes(1.0, "whole", calls), clock.takes(50.0, "parts", calls)])
    for _ in range(6):
        both([])
    assert calls == ["whole", "parts", "whole", "parts", "whole", "whole"]
    assert both.chosen == 0


def test_a_way_whose_first_call_is_disturbed_is_not_given_up(clock: Clock) -> None:
    calls: list[str] = []
    disturbed = clock.takes(iter([50.0, 0.4, 0.4, 0.4]), "whole", calls)
    both = Fastest([disturbed, clock.takes(1.0, "parts", calls)])
    for _ in range(8):
        both([])
    assert both.chosen == 0


def test_one_thread_counts_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what other processes take in between."""
    waits = Clock()
    times = SimpleNamespace(perf_counter=lambda: waits.now, thread_time=lambda: 0.0)
    monkeypatch.setattr(replays, "time", times)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    calls: list[str] = []
    both = Fastest([waits.takes(5.0, "whole", calls), waits.takes(1.0, "parts", calls)])
    for _ in range(8):
        both([])
    assert both.chosen == 0
