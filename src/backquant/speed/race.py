"""Whole models beside each other: they take turns, so that what else the machine does meets all.

What one measurement says may be chance. One model is slower than another only where two figures say so:
the fastest calls of both, and the median of how they compare turn by turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

from backquant.graph import as_arguments
from backquant.graph.objects import fresh
from backquant.runtime import QuantizedModel
from backquant.runtime.replay.timed import Clock

_QUIET = 5e-6  # seconds that decide nothing
_WARM = 3  # calls: weights are packed in the first, the second is recorded
_TURNS = 3, 25  # at least, so that there is a median, and at most
_LONG = 0.25  # seconds after which no turn begins, and no third call to warm up
_VERY_LONG = (
    2.0  # seconds after which two turns are enough: such calls are long enough to vary little
)


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


def race(
    models: Sequence[nn.Module],
    example: Any,
    clock: Clock,
    seconds: float = _LONG,
    *,
    warm: int = 0,
) -> Race:
    """Time ``models`` on the example inputs, in turns: as many as ``seconds`` hold, 3 to 25; 2 where these
    take longer than two seconds. The first ``warm`` models have raced before.

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
    return Race(tuple(zip(*turns, strict=True)))


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
            if count == _WARM - 1 and time.perf_counter() - start > _LONG:
                break
            self()

    def __call__(self) -> Any:
        return self.func(*fresh(self._args), **fresh(self._kwargs))
