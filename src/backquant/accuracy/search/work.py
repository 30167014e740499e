"""One search, from a calibrated model to the answer."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import fx

from backquant.accuracy.calibrated import Calibrated
from backquant.accuracy.figures import ErrorSums, add_errors, bounded_loss, float_tensors
from backquant.accuracy.recipes.ranges import rounded
from backquant.accuracy.search.loop import MOST, Bench, Loop, Trial, front_of
from backquant.accuracy.search.programme import (
    EITHER,
    FLOAT,
    INTEGERS,
    Option,
    Passed,
    Picks,
    Problem,
    SearchUnit,
    solve,
)
from backquant.accuracy.search.result import (
    SearchResult,
    chosen_rows,
    hindrance_of,
    reason_of,
    told,
)
from backquant.accuracy.search.runners import Budget, PartTimes, Runner
from backquant.accuracy.twin import Twin, Walk
from backquant.calibrate.group import Ranks, by_rank_0, divided
from backquant.dtypes import ObservedQParams, find_dtype
from backquant.errors import BackquantError, UsageError
from backquant.files import write_text
from backquant.graph import alike, get_module
from backquant.json_text import read_json
from backquant.match.plan import Reason
from backquant.match.slower import Unit, Value
from backquant.pipeline.lower import quantized_model
from backquant.runtime import QuantizedModel

# What is to be chosen: units of operators with their options, from the plan, losses and times.
#
# 1. Operators of one match, matches that share an observer, and matches that one kernel runs are one unit.
# 2. Each unit has the options ``float`` and ``integers``; other ways to quantize it are added to these.
# 3. ``bytes`` are those of weights, ``bitops`` multiply-adds by the bits of both factors (32 in float).

_FLOAT_BITS = 32
_OWN = 0.05  # of what a unit loses alone is its own, at least


@dataclass(frozen=True)
class Joined:
    """A unit as positions: groups of the twin, and units of the costs."""

    groups: tuple[int, ...]
    costs: tuple[int, ...]


def joined_units(twin: Twin, units: Sequence[Unit]) -> tuple[Joined, ...]:
    """Rule 1. What a kernel does that belongs to no match is a unit of its own."""
    of_match: dict[int, int] = {}
    plan = twin.record.plan
    for place, group in enumerate(twin.groups):
        for anchor in group.anchors:
            match = plan.decisions[anchor].match
            assert match is not None
            of_match[match] = place
    first = list(range(len(twin.groups)))

    def root(place: int) -> int:
        while first[place] != place:
            first[place] = first[first[place]]
            place = first[place]
        return place

    homes: list[int | None] = []
    for unit in units:
        groups = [of_match[match] for match in unit.matches if match in of_match]
        for other in groups[1:]:
            first[root(other)] = root(groups[0])
        homes.append(groups[0] if groups else None)
    members: dict[int, tuple[list[int], list[int]]] = {}
    for place in range(len(twin.groups)):
        members.setdefault(root(place), ([], []))[0].append(place)
    alone = []
    for position, home in enumerate(homes):
        if home is None:
            alone.append(Joined((), (position,)))
        else:
            members[root(home)][1].append(position)
    return (*(Joined(tuple(groups), tuple(costs)) for groups, costs in members.values()), *alone)


@dataclass(frozen=True)
class Losses:
    """Relative error power of the outputs: ``units``, each quantized alone; ``values``, each rounded
    alone."""

    units: Sequence[float]
    values: Sequence[float]


def values_of(parts: PartTimes, units: Sequence[Joined]) -> tuple[tuple[str, Passed], ...]:
    """The values between units, with the nodes that give them."""
    unit_of = {place: index for index, unit in enumerate(units) for place in unit.costs}
    found = [(value.node, _passed(value, unit_of)) for value in parts.costs.values]
    return tuple((node, passed) for node, passed in found if passed is not None)


def problem_of(twin: Twin, parts: PartTimes, units: Sequence[Joined], losses: Losses) -> Problem:
    """The problem in which each unit is in float or as the plan has it.

    Part of what a unit loses alone is the rounding of its inputs and outputs, which it shares with its
    neighbours; the rest is its own.
    """
    made = [_unit(twin, parts, unit) for unit in units]
    values = [
        replace(passed, loss=loss)
        for (_, passed), loss in zip(values_of(parts, units), losses.values, strict=True)
    ]
    shared = [0.0] * len(units)
    for value in values:
        beside = {reader for reader in value.readers if reader is not None}
        takers = {i for i in beside if made[i].options[1].takes == INTEGERS}
        if value.producer is not None and made[value.producer].options[1].gives != FLOAT:
            takers.add(value.producer)
        for unit in takers:
            shared[unit] += value.loss
    own = (max(_OWN * loss, loss - part) for loss, part in zip(losses.units, shared, strict=True))
    return Problem(
        tuple(_with_loss(unit, loss) for unit, loss in zip(made, own, strict=True)),
        tuple(values),
        {"time": parts.outside, **_outside(twin)},
        parts.in_float,
    )


def _with_loss(unit: SearchUnit, loss: float) -> SearchUnit:
    in_float, on_integers = unit.options
    return replace(
        unit,
        options=(in_float, replace(on_integers, figures={**on_integers.figures, "loss": loss})),
    )


def _unit(twin: Twin, parts: PartTimes, unit: Joined) -> SearchUnit:
    groups = [twin.groups[place] for place in unit.groups]
    costs = [parts.costs.units[place] for place in unit.costs]
    nodes = tuple(name for group in groups for name in group.nodes)
    in_float = {
        "loss": 0.0,
        "time": sum(cost.floating for cost in costs),
        "bytes": float(sum(weight_bytes(twin, name) for name in nodes)),
        "bitops": float(_FLOAT_BITS**2 * sum(_work(twin, name) for name in nodes)),
    }
    on_integers = {
        "loss": 0.0,
        "time": sum(cost.integer for cost in costs),
        **quantized_sizes(twin, nodes),
    }
    takes_float = bool(costs) and all(cost.takes_float for cost in costs)
    gives_float = bool(costs) and all(cost.gives_float for cost in costs)
    gives = (FLOAT if takes_float else EITHER) if gives_float else INTEGERS
    return SearchUnit(
        " + ".join(group.name for group in groups),
        ", ".join(dict.fromkeys(group.operator for group in groups)),
        nodes,
        (
            Option("float", in_float),
            Option("integers", on_integers, FLOAT if takes_float else INTEGERS, gives),
        ),
        frozenset(nodes).union(*(cost.nodes for cost in costs)),
    )


def quantized_sizes(twin: Twin, nodes: Iterable[str]) -> dict[str, float]:
    """``bytes`` and ``bitops`` of operators as the plan of ``twin`` has them.

    What the plan does not quantize counts as float.
    """
    plan, config = twin.record.plan, twin.record.backend_config
    size = work = 0.0
    for name in nodes:
        decision, in_float = plan.decisions.get(name), weight_bytes(twin, name)
        weight = activation = _FLOAT_BITS
        if decision is not None and decision.quantized and decision.dtype_config is not None:
            assert decision.match is not None
            entry = config.shared_configs[plan.matches[decision.match].entry]
            dtypes = entry.dtype_configs[decision.dtype_config]
            weight = _bits(dtypes.weight_dtype)
            activation = _bits(dtypes.input_dtype)
            weight = activation if dtypes.weight_dtype is None and not in_float else weight
        size += in_float * weight / _FLOAT_BITS
        work += _work(twin, name) * weight * activation
    return {"bytes": math.ceil(size), "bitops": work}


def _bits(dtype: torch.dtype | None) -> int:
    row = None if dtype is None else find_dtype(dtype)
    if row is not None:
        return row.bits
    return _FLOAT_BITS if dtype is None else 8 * dtype.itemsize


def weight_bytes(twin: Twin, name: str) -> int:
    """What the parameters of an operator of the float graph take."""
    place = twin.place.get(name)
    if place is None:
        return 0
    node: fx.Node = twin.nodes[place]
    if node.op == "call_module":
        module = get_module(twin.float_graph, str(node.target))
        return sum(p.numel() * p.element_size() for p in module.parameters())
    found = 0
    for read in node.all_input_nodes:
        if read.op == "get_attr":
            value = attrgetter(str(read.target))(twin.float_graph)
            if isinstance(value, torch.nn.Parameter):
                found += value.numel() * value.element_size()
    return found


def _work(twin: Twin, name: str) -> int:
    costs = twin.record.costs
    return 0 if costs is None else costs.multiply_adds.get(name, 0)


def _outside(twin: Twin) -> dict[str, float]:
    """Figures of what no group holds."""
    names = [node.name for node in twin.nodes if node.name not in twin.of]
    calls = [name for name in names if twin.nodes[twin.place[name]].op.startswith("call_")]
    return {
        "bytes": float(sum(weight_bytes(twin, name) for name in calls)),
        "bitops": float(_FLOAT_BITS**2 * sum(_work(twin, name) for name in calls)),
    }


def _passed(value: Value, unit_of: Mapping[int, int]) -> Passed | None:
    """A value of the costs between joined units; what stays inside of one needs no conversion."""
    producer = None if value.producer is None else unit_of[value.producer]
    readers = {None if reader is None else unit_of[reader] for reader in value.readers}
    if producer is not None:
        readers.discard(producer)
    if not readers or (producer is None and readers == {None}):
        return None
    ordered = tuple(sorted(readers, key=lambda unit: -1 if unit is None else unit))
    return Passed(producer, ordered, value.quantize, value.dequantize)


_ENDS = 2


@dataclass
class Work:
    """One search, from the calibrated model to the answer."""

    ready: Calibrated
    runner: Runner
    budget: Budget
    resume: str | os.PathLike[str] | None
    judged_by: str
    ranks: Ranks

    def __post_init__(self) -> None:
        self.reference = self.ready.reference()
        self.twin = Twin(self.ready.prepared, self.reference)
        where = self.runner.__class__.__name__
        self.state = SearchState(self.resume, self.twin, (where, self.judged_by))
        self.done = 0
        self.whole: QuantizedModel | None = None
        self.integer: QuantizedModel | None = None
        self.nothing: QuantizedModel | None = None

    def found(self, bench: Bench, told: Callable[[int, int | None], None]) -> SearchResult:
        """The answer; the best so far where the user interrupts, or where one combination fails after all in
        float and all on integers did not."""
        made = self.integer = quantized_model(self.reference, self.ready.source)
        parts = by_rank_0(
            self.ranks,
            "timing operators",
            lambda: self.runner.parts(
                self.ready.prepared, made, self.refused, bench.floating, self.ready.example
            ),
        )
        units = joined_units(self.twin, parts.costs.units)
        groups = [unit.groups for unit in units]
        values = [name for name, _ in values_of(parts, units)]
        problem = problem_of(
            self.twin, parts, units, Losses([0.0] * len(units), [0.0] * len(values))
        )
        held = bench.batches
        count = batches_that_fit(len(groups) + len(values), len(held), len(held))
        total = count * (len(groups) + len(values)) + MOST + _ENDS

        def step() -> None:
            self.done += 1
            told(min(self.done, total), total)

        def trial(problem: Problem, picks: Picks) -> Trial:
            step()
            return bench.trial(problem, picks, self.made(problem, picks))

        def solved(problem: Problem, least: str, limits: Mapping[str, float]) -> Picks | None:
            return by_rank_0(self.ranks, "solving", lambda: solve(problem, least, limits))

        trials = list(self.state.trials)
        loop = Loop(problem, self.budget, trial, self.state.keep_trials, solved, trials)
        stopped = ""
        try:
            loop.run_ends()
            losses = self._losses(groups, values, held[:count], step)
            loop.problem = problem_of(self.twin, parts, units, losses)
            loop.run()
        except KeyboardInterrupt:
            if not loop.trials or self.ranks.size > 1:
                raise
            stopped = "ctrl-C"
        except BackquantError as error:  # of a metric, say, or of an export, for one combination
            if len(loop.trials) < _ENDS or self.ranks.size > 1:
                raise
            stopped = str(error)
        return self._result(loop, bench.in_float, stopped)

    def _losses(
        self,
        groups: list[tuple[int, ...]],
        values: list[str],
        batches: Sequence[Any],
        step: Callable[[], None],
    ) -> Losses:
        known = self.state.losses.get("integers", [])

        def of(batch: Any) -> Noise:
            return losses_alone(self.twin, groups, values, batch, step)

        for found in divided(self.ranks, "comparing outputs", batches[len(known) :], of):
            self.state.keep_losses("integers", found)
        return Losses(*pooled(self.state.losses["integers"]))

    def refused(self) -> QuantizedModel:
        """The model with all that the plan quantizes in float, by the names of the plan."""
        if self.nothing is not None:
            return self.nothing
        plan, reason = self.twin.record.plan, reason_of("", self.budget)
        by_match = {
            index: replace(reason, node=match.anchor)
            for index, match in enumerate(plan.matches)
            if plan.decisions[match.anchor].quantized
        }
        self.nothing = quantized_model(self.ready.reference(by_match), self.ready.source)
        return self.nothing

    def floating(self) -> QuantizedModel:
        """The model as it came, by the names of the plan where it computes the same by these."""
        refused, whole = self.refused(), self.in_float()
        return refused if alike(refused.graph_module, whole.graph_module) else whole

    def in_float(self) -> QuantizedModel:
        """The model as it came, where it can be captured so."""
        if self.whole is None:
            found = self.ready.in_float(reason_of("", self.budget))
            self.whole = self.refused() if found is None else found
        return self.whole

    def made(self, problem: Problem, picks: Picks) -> QuantizedModel:
        """The model with these options."""
        reasons = self._reasons(problem, picks)
        plan = self.twin.record.plan
        by_match: dict[int, Reason] = {}
        quantized = 0
        for unit, pick in zip(problem.units, picks, strict=True):
            for name in unit.nodes:
                match = plan.decisions[name].match
                if match is not None and pick == 0:
                    by_match[match] = replace(reasons[unit.name], node=name)
                quantized += pick != 0
        if not quantized:
            return self.in_float()
        if not by_match and self.integer is not None:
            return self.integer
        return quantized_model(self.ready.reference(by_match), self.ready.source)

    def _reasons(self, problem: Problem, picks: Picks) -> dict[str, Reason]:
        rows = chosen_rows(problem, Trial(picks, 0.0, 0.0, 0.0, 0.0))
        return {row.name: reason_of(row.why, self.budget) for row in rows if row.option == "float"}

    def _result(self, loop: Loop, in_float: float | None, stopped: str) -> SearchResult:
        best = loop.best()
        assert best is not None
        problem = loop.current()
        made = self.made(problem, best.picks)
        rows = chosen_rows(problem, best)
        note = told(self.budget, best, loop.trials, in_float)
        record = made.record
        kept = {"budget": self.budget.to_dict(), "best": best.to_dict()}
        kept["chosen"] = {row.name: row.option for row in rows}
        made.record = replace(
            record, plan=record.plan.noted(note), recipe={**record.recipe, "search": kept}
        )
        return SearchResult(
            made,
            self.budget,
            not best.misses(self.budget),
            best,
            tuple(loop.trials),
            by_rank_0(
                self.ranks,
                "solving",
                lambda: front_of(problem, loop.goal if self.budget.limits_loss else "time"),
            ),
            rows,
            hindrance_of(loop, best),
            in_float,
            stopped,
            tuple(place for place, unit in enumerate(problem.units) if unit.nodes),
        )


# What a search has measured so far, in a file, to go on from.
_FORM = 2  # of ``losses``


class SearchState:
    """``losses``: by way of quantizing, for each batch the noise of all units and of all values. ``trials``:
    what was measured.

    ``path`` ``None``: nothing is kept. ``of``: what it has to be of, beside the model and its calibration:
    what runs it, the metric.
    """

    def __init__(self, path: str | os.PathLike[str] | None, twin: Twin, of: Sequence[str]) -> None:
        qparams = sorted((name, str(found)) for name, found in twin.record.qparams.items())
        known = json.dumps([[group.nodes for group in twin.groups], qparams, list(of), _FORM])
        self.of = hashlib.sha256(known.encode()).hexdigest()
        self.path = None if path is None else Path(path)
        self.losses: dict[str, list[Noise]] = {}
        self.trials: list[Trial] = []
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def keep_losses(self, way: str, batch: Noise) -> None:
        """Add the noise of one more batch."""
        self.losses.setdefault(way, []).append(batch)
        self.write()

    def keep_trials(self, trials: Sequence[Trial]) -> None:
        """All so far."""
        self.trials = list(trials)
        self.write()

    def write(self) -> None:
        """Replace the file."""
        if self.path is not None:
            data = {
                "of": self.of,
                "losses": self.losses,
                "trials": [trial.to_dict() for trial in self.trials],
            }
            write_text(self.path, json.dumps(data), f"resume={str(self.path)!r}")

    def _read(self, path: Path) -> None:
        try:
            data: Any = read_json(path.read_text(encoding="utf-8"))
            known, losses = data["of"], data["losses"]
            trials = [Trial.from_dict(each) for each in data["trials"]]
        except (ValueError, KeyError, TypeError) as error:
            raise _refused(path, "is no state of a search") from error
        if known != self.of:
            raise _refused(path, "is of another model, backend, calibration or metric")
        self.losses, self.trials = losses, trials


def _refused(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path} {what}",
        where=f"resume={str(path)!r}",
        fix=f"resume={str(path) + '-2'!r}   # or remove the file, to begin again",
    )


# What each unit costs at the outputs when it alone is quantized.

#: Of one batch, as a file holds it: the signal of each output (in a list of one), the noise at each output
#: of each unit, and of each value.
Noise: TypeAlias = list[list[list[float]]]

#: Forward passes that a sensitivity may take for each batch of calibration.
PASSES = 6


def batches_that_fit(units: int, calibration: int, held: int) -> int:
    """How many batches are looked at, so that a search costs a few calibrations: one unit costs about half of
    a forward pass.

    >>> batches_that_fit(units=20, calibration=8, held=8), batches_that_fit(400, 1, 8)
    (4, 1)
    """
    return max(1, min(held, int(PASSES * calibration / max(1.0, units / 2))))


def losses_alone(
    twin: Twin,
    units: Sequence[tuple[int, ...]],
    values: Sequence[str],
    batch: Any,
    told: Callable[[], None] = lambda: None,
) -> Noise:
    """The power of the outputs, and that of their error: with the groups of one unit quantized, for each
    unit; with the value of one node rounded as its first observer does, for each of ``values``.

    What lies before is computed once for all. ``told``: called for each unit and value.
    """
    qparams = _rounding(twin)
    steps: list[tuple[int, bool, int]] = []
    for place, groups in enumerate(units):
        if groups:
            steps.append((min(twin.first(group) for group in groups), True, place))
    steps += [(twin.place[name] + 1, False, i) for i, name in enumerate(values) if name in qparams]
    with torch.no_grad():
        inputs = twin.inputs(batch, 0)
        wanted = float_tensors(Walk(twin, inputs, lambda _: False).output())
        nothing: list[ErrorSums] = []
        add_errors(nothing, wanted, wanted)
        found = [[[0.0] * len(wanted)] * len(places) for places in (units, values)]
        walk = Walk(twin, inputs, lambda _: False)
        for first, is_unit, place in sorted(steps):
            walk.to(first)
            if is_unit:
                fork = walk.fork(frozenset(units[place]).__contains__)
            else:
                name = values[place]
                fork = walk.fork(lambda _: False)
                fork.values[name] = rounded(fork.values.get(name), qparams[name])
            sums: list[ErrorSums] = []
            add_errors(sums, wanted, float_tensors(fork.output()))
            found[not is_unit][place] = [each.noise for each in sums]
            told()
    return [[[each.signal for each in nothing]], *found]


def pooled(batches: Sequence[Noise]) -> tuple[list[float], list[float]]:
    """The relative error power of the outputs for each unit and each value, over all batches together: as of
    a combination that is tried. A batch whose outputs are next to nothing counts for as little.

    >>> loud, silent = [[[100.0]], [[1.0]], []], [[[0.001]], [[0.001]], []]
    >>> units, values = pooled([loud, silent])
    >>> round(units[0], 4), values
    (0.01, [])
    """
    signals = [sum(each) for each in zip(*(batch[0][0] for batch in batches), strict=True)]

    def losses(kind: int) -> list[float]:
        return [
            bounded_loss(
                [
                    ErrorSums(signal=signal, noise=sum(noises))
                    for signal, noises in zip(signals, zip(*of_batches, strict=True), strict=True)
                ]
            )
            for of_batches in zip(*(batch[kind] for batch in batches), strict=True)
        ]

    return losses(1), losses(2)


def _rounding(twin: Twin) -> dict[str, ObservedQParams]:
    """The qparams of each value that is observed with one scale, by the node that gives it."""
    found: dict[str, ObservedQParams] = {}
    for site in twin.record.sites.sites:
        qparams = twin.record.qparams.get(site.name)
        if qparams is None or qparams.scale is None or qparams.scale.numel() != 1:
            continue
        if site.role.value not in ("weight", "bias"):
            found.setdefault(site.value, qparams)
    return found
