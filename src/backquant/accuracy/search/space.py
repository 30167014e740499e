"""What is to be chosen: units of operators with their options, from the plan, losses and times.

1. Operators of one match, matches that share an observer, and matches that one kernel runs are one unit.
2. Each unit has the options ``float`` and ``integers``; other ways to quantize it are added to these.
3. ``bytes`` are those of weights, ``bitops`` multiply-adds by the bits of both factors (32 in float).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import torch
from torch import fx

from backquant.accuracy.search.programme import (
    EITHER,
    FLOAT,
    INTEGERS,
    Option,
    Passed,
    Problem,
    SearchUnit,
)
from backquant.accuracy.search.runners import PartTimes
from backquant.accuracy.twin import Twin
from backquant.dtypes import find_dtype
from backquant.graph import get_module
from backquant.match.slower import Unit, Value

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
