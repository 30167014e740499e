from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from backquant.cli.demo import outcome as measure
from backquant.cli.demo.outcome import Latency, compare_latency


class Clock:
    """Time that passes only where a model says so."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


class Slow(nn.Module):
    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.seconds += self.seconds
        return x


def test_the_ratio_is_how_many_times_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    slow, fast = Slow(clock, 0.008), Slow(clock, 0.002)
    latency = compare_latency(slow, fast, torch.zeros(5, 1), rounds=3)
    assert latency.batch == 5
    assert latency.float_ms == pytest.approx(8) and latency.quantized_ms == pytest.approx(2)
    assert latency.ratio == pytest.approx(4)


def test_one_thread_while_measuring_and_as_before_after() -> None:
    seen: list[int] = []

    class Threads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(torch.get_num_threads())
            return x

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        compare_latency(Threads(), Threads(), torch.zeros(1), rounds=1)
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_ratio() -> None:
    assert Latency(1, 3.0, 1.5).ratio == 2.0
