"""Which of several ways to compute the same is the fastest: found out on the calls themselves.

All ways give the same bits, so that each call may take any of them. The first calls take the ways in turns
and measure; from then on the fastest is taken, until torch uses another number of threads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Way = Callable[[list[torch.Tensor]], Any]

_ROUNDS = 4  # of which the first does not count: caches and threads are not warm
_GAIN = 0.97  # of the time of the first way, that another one may take to be preferred to it
_HOPELESS = 3.0  # times the shortest call so far: such a way is not tried again


class Fastest:
    """Calls one of ``ways``.

    >>> both = Fastest([lambda x: x[0] + 1, lambda x: [torch.ones(999999), x[0] + 1][1]])
    >>> [both([torch.ones(1)]).item() for _ in range(9)][-1], both.chosen
    (2.0, 0)
    """

    def __init__(self, ways: Sequence[Way]) -> None:
        self.ways = list(ways)
        # by the number of threads, which may be another one in each thread that calls
        self._chosen: dict[int, int] = {}
        self._seconds: dict[int, list[list[float]]] = {}

    @property
    def chosen(self) -> int | None:
        """Which way is taken with as many threads as torch uses now; ``None`` while they are measured."""
        return self._chosen.get(torch.get_num_threads())

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        """The result for the flattened tensor arguments."""
        threads = torch.get_num_threads()
        chosen = self._chosen.get(threads)
        return self._measured(threads, tensors) if chosen is None else self.ways[chosen](tensors)

    def _measured(self, threads: int, tensors: list[torch.Tensor]) -> Any:
        seconds = self._seconds.setdefault(threads, [[] for _ in self.ways])
        way = min(self._hopeful(seconds), key=lambda i: len(seconds[i]))
        # what else the machine does in between is not this thread's
        clock = time.thread_time if threads == 1 else time.perf_counter
        start = clock()
        result = self.ways[way](tensors)
        seconds[way].append(clock() - start)
        hopeful = self._hopeful(seconds)
        if all(len(seconds[i]) >= _ROUNDS for i in hopeful):
            best = {i: min(seconds[i][1:]) for i in hopeful}
            fastest = min(best, key=best.__getitem__)
            first = best.get(0)
            self._chosen[threads] = 0 if first and best[fastest] >= _GAIN * first else fastest
        return result

    @staticmethod
    def _hopeful(seconds: list[list[float]]) -> list[int]:
        """The ways that are not several times as slow as another one; of those that are warm."""
        warm = [min(found[1:], default=math.inf) for found in seconds]
        least = min(warm)
        return [i for i, best in enumerate(warm) if math.isinf(best) or best <= _HOPELESS * least]
