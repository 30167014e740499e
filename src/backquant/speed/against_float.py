"""A quantized model that is not slower than the float model, nor than the same with all on integers.

The parts of a model are timed one by one, and may promise more than the whole holds: layouts that kernels
give cost the float operators behind them, and a cache holds a kernel's weights alone. So whole models run
beside each other (``race``): float, all on integers, and what the parts promise. Where the fastest is slower
than float, what pays the least is left in float step by step (``slower_as_a_whole``), at most ``FACTORS``
times; what is clearly faster than the fastest before it stands. What is slower than float even then is given
back in float, as it came (``ModelFactories.in_float``). So is what is no faster, where integers would compute
next to nothing of it (``_Idle``): what they round is lost for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from backquant.errors import CoverageError
from backquant.graph import own_buffers
from backquant.lower import EngineInfo
from backquant.match.plan import Reason
from backquant.match.slower import Costs, all_slower, nothing_gained, slower_as_a_whole
from backquant.prepare import Record
from backquant.runtime import QuantizedModel
from backquant.runtime.replay.timed import Clock, stopwatch_alone
from backquant.speed.race import FACTOR, Race, race

#: Multiply-adds of a model below which nothing is timed: it is called for its calls, not for its work.
LEAST = 100_000
#: How much longer than measured integers take, one after the other, until the whole is not slower.
FACTORS = (1.3, 2.0, 4.0, 1e6)

_SLOWER = FACTOR  # than float, and the model is not left as it is
_GAIN = 0.97  # what is faster by less than 3 % is as fast
_LITTLE = (
    0.01,
    0.1,
)  # of multiply-adds and of weights: what integers with less of both gain is nothing


@dataclass(frozen=True)
class Timing:
    """How times are taken, and what they do not decide.

    ``least``: as ``LEAST``; ``least_recurrent``: the same for models with recurrent layers, of which the
    smallest lose the most. ``keep_named``: the mapping is the user's, and what it names stays as it says.
    ``keep``: modules that stay on integers.
    """

    clock: Clock = stopwatch_alone
    least: int = LEAST
    least_recurrent: int = 0
    keep_named: bool = False
    keep: tuple[str, ...] = ()

    def is_worthwhile(self, engine: EngineInfo | None, record: Record) -> bool:
        """Whether a model with this work on this engine is timed."""
        if engine is None or engine.as_described or record.costs is None:
            return False
        return sum(record.costs.multiply_adds.values()) >= self.least


def timed(model: QuantizedModel, seconds: float, floating: float) -> QuantizedModel:
    """``model`` with what a call of it takes, and one of the float model."""
    figures = replace(model.record.figures, seconds=seconds, float_seconds=floating)
    model.record = replace(model.record, figures=figures)
    return model


def noted(model: QuantizedModel, note: str) -> QuantizedModel:
    """``model`` with a note in its plan."""
    model.record = replace(model.record, plan=model.plan.noted(note))
    return model


class ModelFactories(NamedTuple):
    """How models are made that have less on integers; both raise ``CoverageError`` where too little would be.

    ``without``: what these matches are is left in float, by position. ``in_float``: nothing is quantized, and
    nothing taken apart, for this reason; ``None`` where that cannot be had.
    """

    without: Callable[[Mapping[int, Reason]], QuantizedModel]
    in_float: Callable[[Reason], QuantizedModel | None]


class Chosen(NamedTuple):
    """A model, and the reasons of what is left in float, by position of the match.

    ``is_faster``: what its parts promise is so much, in calls so long, that it need not run beside the model
    with all on integers.
    """

    made: QuantizedModel
    in_float: Mapping[int, Reason]
    is_faster: bool = False


def not_slower(
    made: QuantizedModel,
    chosen: Chosen | None,
    ways: ModelFactories,
    costs: Costs,
    original: nn.Module,
    example: Any,
    timing: Timing,
) -> QuantizedModel:
    """The fastest of ``made``, which keeps all on integers, and ``chosen``; or, where that is slower than
    ``original``, of models with less on integers, down to none. With a note of both times.
    """
    floating = own_buffers(original)
    first = [made] if chosen is None else [chosen.made] if chosen.is_faster else [made, chosen.made]
    # the float model has been called before: to see whether the example inputs fit, and what it gives
    beside = race([floating, *first], example, timing.clock, warm=1, decides=True)
    takes_second = len(first) == 2 and beside.is_slower(1, 2, 1 / _GAIN)
    takes_chosen = chosen is not None and (takes_second or chosen.is_faster)
    best = _Tried(first[takes_second], beside, 1 + takes_second)
    left = dict(chosen.in_float) if chosen is not None and takes_chosen else {}
    for factor in FACTORS:
        if not best.is_slower:
            break
        seconds, in_float = best.seconds, best.floating
        more = slower_as_a_whole(made.plan, costs, factor, 1e6 * seconds, 1e6 * in_float)
        if more.keys() <= left.keys():
            continue
        left = {**more, **left}
        try:
            after = ways.without(left)
        except CoverageError:
            break
        beside = race([floating, best.made, after], example, timing.clock, warm=2, decides=True)
        is_faster = beside.is_slower(1, 2, 1 / _GAIN)
        best = _Tried(after if is_faster else best.made, beside, 1 + is_faster)
    kept = any(unit.kept for unit in costs.units)
    share = None if kept else _little(made, costs, left, floating)
    if kept or not (best.is_slower or (share is not None and not best.is_faster)):
        return timed(noted(best.made, best.note()), best.seconds, best.floating)
    return _in_float(best, ways, floating, example, timing, share)


def _little(
    made: QuantizedModel, costs: Costs, left: Mapping[int, Reason], floating: nn.Module
) -> float | None:
    """The share of the multiply-adds on integers, where that and that of the weights are next to none."""
    counted = made.record.costs
    units = [unit for unit in costs.units if left.keys().isdisjoint(unit.matches)]
    wholes = (
        0 if counted is None else sum(counted.multiply_adds.values()),
        sum(tensor.numel() for tensor in floating.parameters()),
    )
    parts = sum(unit.multiply_adds for unit in units), sum(unit.weights for unit in units)
    if any(part >= most * whole for part, most, whole in zip(parts, _LITTLE, wholes, strict=True)):
        return None
    return parts[0] / wholes[0]


def _in_float(
    best: _Tried,
    ways: ModelFactories,
    floating: nn.Module,
    example: Any,
    timing: Timing,
    share: float | None,
) -> QuantizedModel:
    """The model as it came, where another race says as well that ``best`` is slower; or no faster, with
    only this ``share`` of the multiply-adds on integers."""
    times = 1e6 * best.seconds, 1e6 * best.floating
    slower = best.is_slower
    reason = all_slower(*times) if slower or share is None else nothing_gained(*times, share)
    try:
        after = ways.in_float(reason)
    except CoverageError:
        after = None
    if after is None:
        return timed(noted(best.made, best.note()), best.seconds, best.floating)
    beside = race([floating, best.made, after], example, timing.clock, warm=2, decides=True)
    best = _Tried(best.made, beside, 1)
    if slower and best.is_slower and beside.is_slower(1, 2, 1 / _GAIN):
        return noted(
            after,
            "the whole model is slower in int8 here, with any layers in float: it is returned "
            f"in float, unchanged ({best.times()}, measured on the example inputs)",
        )
    if share is not None and not beside.is_slower(2, 1, 1 / _GAIN):
        return noted(
            after,
            f"the whole model is no faster with the {100 * share:.1g} % of its multiply-adds on "
            "integers that pay here: it is returned in float, unchanged "
            f"({_beside(best.seconds, beside.seconds(2))}, measured on the example inputs)",
        )
    return timed(noted(best.made, best.note()), best.seconds, best.floating)


def _beside(seconds: float, floating: float) -> str:
    return f"{1e3 * seconds:.3g} ms, in float {1e3 * floating:.3g} ms"


class _Tried(NamedTuple):
    """A model, the race that it ran last, in which the float model was the first, and its place there."""

    made: QuantizedModel
    race: Race
    place: int

    @property
    def seconds(self) -> float:
        return self.race.seconds(self.place)

    @property
    def floating(self) -> float:
        return self.race.seconds(0)

    @property
    def is_slower(self) -> bool:
        return self.race.is_slower(self.place, 0, _SLOWER)

    @property
    def is_faster(self) -> bool:
        return self.race.is_slower(0, self.place, 1 / _GAIN)

    def times(self) -> str:
        return _beside(self.seconds, self.floating)

    def note(self) -> str:
        times = self.times()
        what = "the whole model on the example inputs, measured here"
        if self.is_slower:
            return f"{what}: {times}; slower than float, with any layers in float"
        return f"{what}: {times} ({self.floating / self.seconds:.2f} times as fast)"
