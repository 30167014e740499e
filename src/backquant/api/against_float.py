"""Whole models beside each other, and a quantized model that is not slower than the float model.

The parts of a model are timed one by one, and may promise more than the whole holds: layouts that kernels
give cost the float operators behind them, and a cache holds a kernel's weights alone. So the whole is timed
beside the float model, and where it is slower, what pays the least is left in float step by step
(``slower_as_a_whole``), at most ``FACTORS`` times; the fastest of all that were made stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from backquant.errors import CoverageError
from backquant.graph import as_arguments, own_buffers
from backquant.graph.objects import fresh
from backquant.lower import EngineInfo
from backquant.match.plan import Reason
from backquant.match.slower import Costs, slower_as_a_whole
from backquant.report.build import ReportSource
from backquant.runtime import QuantizedModel
from backquant.runtime.replay.timed import Clock, stopwatch

__all__ = ["FACTORS", "LEAST", "Chosen", "Converted", "Timing", "is_faster", "not_slower"]

#: Multiply-adds of a model below which nothing is timed: it is called for its calls, not for its work.
LEAST = 100_000
#: How much longer than measured integers take, one after the other, until the whole is not slower.
FACTORS = (1.3, 2.0, 4.0, 1e6)

_SLOWER = 1.03  # than float, and the model is not left as it is
_GAIN, _QUIET = 0.97, 5e-6  # what is faster by less than 3 % or 5 µs is as fast
_TURNS, _MORE = 2, 2  # more where the first turns are near the limit
_NEAR = 0.1
_WARM = 3  # calls: weights are packed in the first, the second is recorded


@dataclass(frozen=True)
class Timing:
    """How times are taken, and what they do not decide. ``least``: as ``LEAST``. ``keep_named``: the
    mapping is the user's, and what it names stays as it says. ``keep``: modules that stay on integers."""

    clock: Clock = stopwatch
    least: int = LEAST
    keep_named: bool = False
    keep: tuple[str, ...] = ()

    def is_worthwhile(self, engine: EngineInfo | None, multiply_adds: Iterable[int]) -> bool:
        """Whether a model with this work on this engine is timed.

        >>> Timing().is_worthwhile(None, [10**9])
        False
        """
        return engine is not None and sum(multiply_adds) >= self.least


class Converted(NamedTuple):
    """A lowered model, and what its report is built from."""

    model: QuantizedModel
    source: ReportSource

    def noted(self, note: str) -> Converted:
        """The same with a note in the plan."""
        plan = self.model.plan
        self.model.plan = replace(plan, notes=(*plan.notes, note))
        return self._replace(source=replace(self.source, plan=self.model.plan))


class Chosen(NamedTuple):
    """A model, and why what of it is left in float, by position of the match."""

    made: Converted
    in_float: Mapping[int, Reason]


def is_faster(after: nn.Module, before: nn.Module, example: Any, clock: Clock) -> bool:
    """Whether ``after`` is clearly faster than ``before`` on the example inputs."""
    first, second = seconds_beside(before, after, example, clock)
    return second < _GAIN * first and second < first - _QUIET


def not_slower(  # size: the model as it is, what makes others of it, and what it is measured beside
    chosen: Chosen,
    convert: Callable[[Mapping[int, Reason]], Converted],
    costs: Costs,
    original: nn.Module,
    example: Any,
    timing: Timing,
) -> Converted:
    """``chosen``, or a model with less on integers, where it is slower than ``original``; with a note.

    ``convert`` raises ``CoverageError`` where too little would stay quantized.
    """
    floating = own_buffers(original)

    def tried(one: Converted) -> _Tried:
        return _Tried(one, *seconds_beside(floating, one.model, example, timing.clock))

    plan, best = chosen.made.model.plan, tried(chosen.made)
    left = dict(chosen.in_float)
    for factor in FACTORS:
        if not best.is_slower:
            break
        more = slower_as_a_whole(plan, costs, factor, 1e6 * best.seconds, 1e6 * best.floating)
        if more.keys() <= left.keys():
            continue
        left = {**more, **left}
        try:
            after = tried(convert(left))
        except CoverageError:
            break
        best = min(best, after, key=lambda one: one.seconds / one.floating)
    return best.made.noted(best.note())


class _Tried(NamedTuple):
    """A model, and how long it and the float model took in turns."""

    made: Converted
    floating: float
    seconds: float

    @property
    def is_slower(self) -> bool:
        return self.seconds > _SLOWER * self.floating and self.seconds > self.floating + _QUIET

    def note(self) -> str:
        times = f"{1e3 * self.seconds:.3g} ms, in float {1e3 * self.floating:.3g} ms"
        what = "the whole model on the example inputs, measured here"
        if self.is_slower:
            return f"{what}: {times}; slower than float, whatever is left in float"
        return f"{what}: {times} ({self.floating / self.seconds:.2f} times as fast)"


def seconds_beside(
    one: nn.Module, other: nn.Module, example: Any, clock: Clock
) -> tuple[float, float]:
    """The fastest calls of two models that take turns.

    >>> seconds_beside(nn.ReLU(), nn.ReLU(), torch.zeros(1), lambda run: 1.0)
    (1.0, 1.0)
    """
    calls = _Call(one, example), _Call(other, example)
    with torch.no_grad():
        for call in calls:
            for _ in range(_WARM if isinstance(call.func, QuantizedModel) else 1):
                call()
        best = [min(times) for times in zip(*_turns(calls, clock, _TURNS), strict=True)]
        if abs(best[1] - best[0]) < _NEAR * best[0]:
            more = [*_turns(calls, clock, _MORE), best]
            best = [min(times) for times in zip(*more, strict=True)]
    return best[0], best[1]


def _turns(calls: Iterable[_Call], clock: Clock, count: int) -> list[list[float]]:
    calls = tuple(calls)
    return [[clock(call) for call in calls] for _ in range(count)]


class _Call:
    """One call of a model on arguments that it has not changed yet."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.func = model
        self._args, self._kwargs = as_arguments(example)

    def __call__(self) -> Any:
        return self.func(*fresh(self._args), **fresh(self._kwargs))
