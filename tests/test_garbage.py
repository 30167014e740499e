from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import backquant
from backquant.garbage import collected_rarely, makes_graphs


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


def test_after_an_error_the_thresholds_are_those_of_before() -> None:
    with pytest.raises(ZeroDivisionError), collected_rarely():
        assert gc.get_threshold() == (50_000, 20, 1_000)
        _ = 1 / 0
    assert gc.get_threshold() == (700, 10, 10)


def test_blocks_in_two_threads_end_with_the_last_one() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collected_rarely():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with collected_rarely():
        thread.start()
        assert entered.wait(60)
    assert gc.get_threshold()[0] == 50_000
    leave.set()
    thread.join()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("said", [(0, 10, 10), (10**6, 10**3, 10**4)])
def test_who_collects_more_rarely_keeps_that(said: tuple[int, int, int]) -> None:
    gc.set_threshold(*said)
    with collected_rarely():
        assert gc.get_threshold()[0] == said[0]
        assert gc.get_threshold()[1] >= said[1]
    assert gc.get_threshold() == said


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with collected_rarely():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_quantize_collects_rarely_and_says_what_it_is() -> None:
    seen = []

    class Told(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(gc.get_threshold()[0])
            return x

    model = nn.Sequential(Told(), nn.Linear(4, 4)).eval()
    backquant.quantize(model, calibration=[(torch.randn(2, 4),)], capture="export")
    assert 50_000 in seen
    assert gc.get_threshold() == (700, 10, 10)
    assert backquant.quantize.__doc__
    assert makes_graphs(Told).__name__ == "Told"
