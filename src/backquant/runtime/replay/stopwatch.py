"""How long a call takes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import torch

from backquant.runtime.replay.threads import alone

Clock = Callable[[Callable[[], object]], float]

_SHORT = 5e-5  # seconds that one round of timing takes at least
_ROUNDS = (
    (1e-3, 4),
    (2e-2, 1),
    (0.1, 1),
    (math.inf, 0),
)  # (seconds, rounds): a call that takes less than so long is repeated in so many rounds


def stopwatch(run: Callable[[], object], counter: Callable[[], float] | None = None) -> float:
    """Seconds of one call of ``run``: the fastest of a few rounds, of which each is long enough to measure; a
    call of more than a tenth of a second is one already.

    CPU time of this thread where torch uses no other, so that what else the machine does counts the least; or
    what ``counter`` counts.

    >>> 0 <= stopwatch(int) < 1
    True
    """
    usual = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    clock = usual if counter is None else counter
    start = clock()
    run()
    once = max(clock() - start, 1e-7)
    count = max(1, int(_SHORT / once))
    best, rounds = once, next(rounds for limit, rounds in _ROUNDS if once < limit)
    for _ in range(rounds):
        start = clock()
        for _ in range(count):
            run()
        best = min(best, (clock() - start) / count)
    return best


def stopwatch_alone(run: Callable[[], object]) -> float:
    """As ``stopwatch``: CPU time of this thread, which does it by itself, however many torch may use. Where
    threads wait for each other, what else the machine does counts more than what is measured.

    >>> 0 <= stopwatch_alone(int) < 1
    True
    """
    return alone(partial(stopwatch, run))
