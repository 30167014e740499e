from __future__ import annotations

import pytest
import torch

from backquant.runtime.replay.timed import stopwatch, stopwatch_alone
from backquant.speed.against_float import Timing


@pytest.mark.parametrize("seconds", [0.0, 0.03])
def test_the_stopwatch_calls_often_enough(seconds: float) -> None:
    calls = []

    def run() -> None:
        calls.append(None)
        if seconds:
            torch.ones(int(seconds * 3e8)).sum()

    assert stopwatch(run) > 0
    assert len(calls) >= 2


def test_what_is_timed_alone_uses_one_thread_however_many_there_are() -> None:
    """Threads that wait for each other measure what else the machine does."""
    before = torch.get_num_threads()
    found: list[int] = []
    torch.set_num_threads(2)
    try:
        assert stopwatch_alone(lambda: found.append(torch.get_num_threads())) > 0
        assert Timing().clock is stopwatch_alone
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert set(found) == {1}
