"""What does not pay: operators that are slower on integers here than in float are left in float.

The kernels of a lowered model and the operators of its float graph are timed on the example inputs, each
kernel shape once; ``match`` decides (``slower_than_float``), the model is converted again, and the whole of
both is timed. The second stands only if it is clearly faster.

1. Off where a mapping was passed, unless ``slower="float"`` asks for it; operators that the mapping names
   stay as it says.
2. Off without an engine, and for models whose work is too small to time (``LEAST``).
3. Where less than is required would stay on integers, the model stays as it was, with a note.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from backquant.api.cost_table import Times, cost_table
from backquant.errors import CoverageError, UsageError
from backquant.graph import as_arguments
from backquant.lower import EngineInfo, QuantizedModel
from backquant.lower.replay.timed import Clock, NodeTimes, stopwatch
from backquant.match.plan import Reason
from backquant.match.slower import slower_than_float
from backquant.prepare import PreparedModule, unobserved
from backquant.report.build import ReportSource

__all__ = [
    "LEAST",
    "TIMING",
    "Converted",
    "Timing",
    "asked_slower",
    "is_faster",
    "the_faster",
    "what_is_slower",
]

#: Multiply-adds of a model below which nothing is timed: it is called for its calls, not for its work.
LEAST = 100_000

_CHOICES = ("float", "keep")
_GAIN, _QUIET = 0.97, 5e-6  # what is faster by less than 3 % or 5 µs is as fast
_ROUNDS = 2
_TOO_MUCH = (
    "measured on the example inputs, less than required is faster on integers than in float: "
    "what is slower stays on integers, too"
)


def asked_slower(slower: Any, has_mapping: bool) -> bool:
    """Whether what is slower than float is to be left in float. Raises ``UsageError``.

    >>> asked_slower(None, has_mapping=False), asked_slower(None, has_mapping=True)
    (True, False)
    """
    if slower is None:
        return not has_mapping
    if slower not in _CHOICES:
        raise UsageError(
            f"slower={slower!r} is no choice",
            where="slower",
            fix='slower="float" leaves in float what is slower on integers; slower="keep" does not',
        )
    return bool(slower == "float")


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


TIMING = Timing()


class Converted(NamedTuple):
    """A lowered model, and what its report is built from."""

    model: QuantizedModel
    source: ReportSource

    def noted(self, note: str) -> Converted:
        """The same with a note in the plan."""
        plan = self.model.plan
        self.model.plan = replace(plan, notes=(*plan.notes, note))
        return self._replace(source=replace(self.source, plan=self.model.plan))


def the_faster(
    made: Converted,
    convert: Callable[[Mapping[int, Reason]], Converted],
    prepared: PreparedModule,
    example: Any,
    timing: Timing,
) -> Converted:
    """``made``, or what ``convert`` makes without what is slower on integers, if that is faster.

    ``convert`` raises ``CoverageError`` where too little would stay quantized.
    """
    work = made.source.costs.multiply_adds
    reasons = what_is_slower(prepared, made.model, example, work, timing)
    if not reasons:
        return made
    try:
        after = convert(reasons)
    except CoverageError:
        return made.noted(_TOO_MUCH)
    return after if is_faster(after.model, made.model, example, timing) else made


def what_is_slower(
    prepared: PreparedModule,
    quantized: QuantizedModel,
    example: Any,
    multiply_adds: Mapping[str, int],
    timing: Timing,
) -> dict[int, Reason]:
    """The reasons of what is slower on integers, by position of the match in the plan of ``quantized``."""
    args, kwargs = as_arguments(example)
    times = Times(
        NodeTimes(unobserved(prepared), args, kwargs),
        NodeTimes(quantized.graph_module, args, kwargs),
        multiply_adds,
        timing.clock,
    )
    for _ in range(_ROUNDS):
        times.floats.measure(timing.clock)
        times.integers.measure(timing.clock)
    costs = cost_table(quantized, times, keep=timing.keep, keep_named=timing.keep_named)
    return slower_than_float(quantized.plan, costs)


def is_faster(after: nn.Module, before: nn.Module, example: Any, timing: Timing) -> bool:
    """Whether ``after`` is clearly faster than ``before`` on the example inputs."""
    args, kwargs = as_arguments(example)
    best: dict[int, float] = {}
    for model in (before, after) * _ROUNDS:
        for _ in range(2):
            model(*args, **kwargs)  # packs and records
        seconds = timing.clock(partial(model, *args, **kwargs))
        best[id(model)] = min(seconds, best.get(id(model), seconds))
    first, second = best[id(before)], best[id(after)]
    return second < _GAIN * first and second < first - _QUIET
