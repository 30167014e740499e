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

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn

from backquant.calibrate.group import Ranks
from backquant.errors import CoverageError
from backquant.graph import as_arguments, own_buffers
from backquant.graph.objects import fresh
from backquant.lower import EngineInfo
from backquant.match.plan import Reason
from backquant.match.slower import Costs, all_slower, nothing_gained, slower_as_a_whole
from backquant.prepare import Record
from backquant.runtime import QuantizedModel
from backquant.runtime.replay.timed import Clock, stopwatch_alone

# Whole models beside each other: they take turns, so that what else the machine does meets all.
#
# What one measurement says may be chance. One model is slower than another only where two figures say so:
# the fastest calls of both, and the median of how they compare turn by turn.


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


# What is faster is measured once: by rank 0, and all ranks take what it chose.


def chosen_on_rank_0(
    ranks: Ranks,
    made: QuantizedModel,
    ways: ModelFactories,
    choose: Callable[[ModelFactories], QuantizedModel],
) -> QuantizedModel:
    """What ``choose`` gives on rank 0; ``made``, or one of ``ways``, made anew on the others."""
    if ranks.size == 1:
        return choose(ways)
    if ranks.rank != 0:
        (name, argument), notes = ranks.exchange("measuring times", None)[0]
        model = made if name is None else getattr(ways, name)(argument)
        return _with_notes(model, notes)
    tried: list[tuple[QuantizedModel, str, object]] = []

    def without(reasons: Mapping[int, Reason]) -> QuantizedModel:
        model = ways.without(reasons)
        tried.append((model, "without", dict(reasons)))
        return model

    def in_float(reason: Reason) -> QuantizedModel | None:
        model = ways.in_float(reason)
        if model is not None:
            tried.append((model, "in_float", reason))
        return model

    chosen = choose(ModelFactories(without, in_float))
    way = next(((name, given) for model, name, given in tried if model is chosen), (None, None))
    ranks.exchange("measuring times", (way, chosen.plan.notes))
    return chosen


def _with_notes(model: QuantizedModel, notes: tuple[str, ...]) -> QuantizedModel:
    model.record = replace(model.record, plan=replace(model.plan, notes=notes))
    return model
