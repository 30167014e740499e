"""Which of several ways to compute the same is the fastest: found out on the calls themselves.

All ways give the same bits, so that each call may take any of them. The first calls take the ways in turns
and measure; from then on the fastest is taken, until torch uses another number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Way = Callable[[list[torch.Tensor]], Any]

_ROUNDS = 4  # of which the first does not count: caches and threads are not warm
_GAIN = 0.97  # of the time of the first way, that another one may take to be preferred to it


class Fastest:
    """Calls one of ``ways``. ``chosen``: which; ``None`` while they are measured.

    >>> both = Fastest([lambda x: x[0] + 1, lambda x: [time.sleep(0.01), x[0] + 1][1]])
    >>> [both([torch.ones(1)]).item() for _ in range(9)][-1], both.chosen
    (2.0, 0)
    """

    def __init__(self, ways: Sequence[Way]) -> None:
        self.ways = list(ways)
        self._begin(torch.get_num_threads())

    def _begin(self, threads: int) -> None:
        self.chosen: int | None = None
        self._threads = threads
        self._seconds: list[list[float]] = [[] for _ in self.ways]

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        """The result for the flattened tensor arguments."""
        threads = torch.get_num_threads()
        if threads != self._threads:
            self._begin(threads)
        chosen = self.chosen
        return self._measured(tensors) if chosen is None else self.ways[chosen](tensors)

    def _measured(self, tensors: list[torch.Tensor]) -> Any:
        seconds = self._seconds
        way = min(range(len(self.ways)), key=lambda i: len(seconds[i]))
        start = time.perf_counter()
        result = self.ways[way](tensors)
        seconds[way].append(time.perf_counter() - start)
        if all(len(found) >= _ROUNDS for found in seconds):
            best = [min(found[1:]) for found in seconds]
            fastest = min(range(len(best)), key=best.__getitem__)
            self.chosen = fastest if best[fastest] < _GAIN * best[0] else 0
        return result
