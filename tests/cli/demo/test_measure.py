from __future__ import annotations

import time

import torch
from torch import nn

from backquant.cli.demo.measure import Latency, compare_latency


class Sleep(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return x


def test_the_ratio_is_how_many_times_faster() -> None:
    latency = compare_latency(Sleep(0.008), Sleep(0.002), torch.zeros(5, 1), rounds=3)
    assert latency.batch == 5
    assert 8 <= latency.float_ms < 16 and 2 <= latency.quantized_ms < 6
    assert 1.5 < latency.ratio < 6


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
