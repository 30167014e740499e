"""Whole models beside each other: they take turns, so that what else the machine does meets all.

What one measurement says may be chance. One model is slower than another only where two figures say so:
the fastest calls of both, and the median of how they compare turn by turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from statistics import median
from typing import Any

import torch
from torch import nn

from backquant.graph import as_arguments
from backquant.graph.objects import fresh
from backquant.runtime import QuantizedModel
from backquant.runtime.replay.timed import Clock

#: How many times as long a model takes that is slower.
FACTOR = 1.03
_QUIET = 5e-6  # seconds that decide nothing
_WARM = 3  # calls: weights are packed in the first, the second is recorded
_TURNS = 3, 25  # at least, so that there is a median, and at most
_LONG = 0.25  # seconds after which no turn begins, and no third call to warm up
# seconds after which two turns are enough, and one that is as clear as ``_NEAR``: such calls are long
# enough to vary little
_VERY_LONG = 2.0
_NEAR = 1.15  # what makes one or two turns of such calls clear
_FAR = 1.5  # what makes two turns of any calls clear
_MANY = 1.02  # what makes more turns clear


@dataclass(frozen=True)
class Race:
    """Seconds of each model in each turn.

    >>> Race(((2.0, 2.0, 9.0), (1.0, 1.0, 1.0))).is_slower(0, 1, 1.03)
    True
    """

    turns: tuple[tuple[float, ...], ...]

    def seconds(self, one: int) -> float:
        """The fastest call."""
        return min(self.turns[one])

    def is_slower(self, one: int, other: int, factor: float) -> bool:
        """Whether ``one`` takes more than ``factor`` times as long as ``other``, by both figures."""
        ratios = [a / max(b, 1e-9) for a, b in zip(self.turns[one], self.turns[other], strict=True)]
        first, second = self.seconds(one), self.seconds(other)
        return first > factor * second and median(ratios) > factor and first > second + _QUIET

    def is_clear(self, factor: float, near: float) -> bool:
        """Whether ``is_slower`` says the same of each pair by factors ``near`` times as large and small.

        >>> even, slower = (1.0, 1.0), (1.035, 1.035)
        >>> Race((even, even)).is_clear(1.03, 1.02), Race((even, slower)).is_clear(1.03, 1.02)
        (True, False)
        """
        return all(
            self.is_slower(one, other, factor * near) == self.is_slower(one, other, factor / near)
            for one, other in permutations(range(len(self.turns)), 2)
        )


def race(
    models: Sequence[nn.Module],
    example: Any,
    clock: Clock,
    seconds: float = _LONG,
    *,
    warm: int = 0,
    decides: bool = False,
) -> Race:
    """Time ``models`` on the example inputs, in turns: as many as ``seconds`` hold, 3 to 25; 2 where these
    take longer than two seconds. The first ``warm`` models have been called before. ``decides``: what is
    asked for is which of them is slower, by ``FACTOR``: fewer turns are enough that say so clearly.

    >>> race([nn.ReLU(), nn.ReLU()], torch.zeros(1), lambda run: 1.0).seconds(1)
    1.0
    """
    calls = [_Call(model, example) for model in models]
    with torch.no_grad():
        for call in calls[warm:]:
            call.warm_up()
        turns: list[list[float]] = []
        start = time.perf_counter()
        while _goes_on(len(turns), time.perf_counter() - start, seconds):
            turns.append([clock(call) for call in calls])
            if decides and _is_clear(_race(turns), time.perf_counter() - start):
                break
    return _race(turns)


def _race(turns: Sequence[Sequence[float]]) -> Race:
    return Race(tuple(zip(*turns, strict=True)))


def _is_clear(found: Race, taken: float) -> bool:
    turns = len(found.turns[0])
    if turns >= _TURNS[0]:
        return found.is_clear(FACTOR, _MANY)
    if taken > _VERY_LONG:
        return found.is_clear(FACTOR, _NEAR)
    return turns > 1 and found.is_clear(FACTOR, _FAR)


def _goes_on(turns: int, taken: float, seconds: float) -> bool:
    """Whether another turn follows so many, which have taken so long."""
    least, most = _TURNS
    if turns < least:
        return turns < least - 1 or taken < max(seconds, _VERY_LONG)
    return turns < most and taken < seconds


class _Call:
    """One call of a model on arguments that it has not changed yet."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.func = model
        self._args, self._kwargs = as_arguments(example)

    def warm_up(self) -> None:
        start = time.perf_counter()
        for count in range(_WARM if isinstance(self.func, QuantizedModel) else 1):
            taken = time.perf_counter() - start
            if taken > (_LONG if count == _WARM - 1 else _VERY_LONG):
                break
            self()

    def __call__(self) -> Any:
        return self.func(*fresh(self._args), **fresh(self._kwargs))
