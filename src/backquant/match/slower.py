"""Choose by measured times which operators run faster in float. Measures nothing and edits nothing.

Each operator takes either the time of its integer kernel or its time in float; a quantize or dequantize
between the two kinds takes time as well. So an operator with a small gain is worth quantizing between
quantized neighbours, and is not between float ones. All operators are therefore decided together: the
choice with the smallest total time is a minimum cut between integers (source) and float (sink).

1. What the user asked for by name stays on integers (``Unit.kept``).
2. Operators are only left in float for a clear gain: their time in float is multiplied by ``MARGIN``, plus
   ``QUIET`` for each. So a small error of measurement does not change the choice.
3. A value is quantized once for all that read it, and dequantized once.
4. At least one operator stays on integers: where all with multiply-adds would be left in float, the one that
   loses the least time is kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from backquant.match.plan import Plan, Reason
from backquant.reason_codes import ReasonCode

MARGIN = 1.05
QUIET = 0.3  # microseconds by which integers may be slower and count as equal

_SOURCE, _SINK = 0, 1


@dataclass(frozen=True)
class Unit:
    """Matches that are decided together, because one kernel runs them; times in microseconds.

    ``integer``: on integer kernels; ``floating``: in float. ``kept``: it stays on integers, whatever it
    costs. ``takes_float`` and ``gives_float``: so do its kernels, and nothing is converted there.
    ``multiply_adds`` and ``weights``: how many it has. ``nodes``: of the float graph, whose times it has.
    """

    matches: tuple[int, ...]
    integer: float
    floating: float
    kept: bool = False
    takes_float: bool = False
    gives_float: bool = False
    multiply_adds: int = 0
    weights: int = 0
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Value:
    """What one operator gives and others read, by positions of units; None: a float operator, an input
    or the result of the model. ``quantize`` and ``dequantize``: microseconds. ``node``: that gives it."""

    producer: int | None
    readers: tuple[int | None, ...]
    quantize: float
    dequantize: float
    node: str = ""


@dataclass(frozen=True)
class Costs:
    """The measured times of one model on one machine."""

    units: tuple[Unit, ...]
    values: tuple[Value, ...] = ()


def in_float(costs: Costs) -> frozenset[int]:
    """The positions of the units to leave in float: rules 1 to 4."""
    floats = _cheapest(costs)
    working = [place for place, unit in enumerate(costs.units) if unit.multiply_adds]
    if not working or not floats.issuperset(working):
        return floats
    least = min(working, key=lambda i: total(costs, floats - {i}))
    units = tuple(replace(u, kept=u.kept or i == least) for i, u in enumerate(costs.units))
    return _cheapest(replace(costs, units=units))


def _cheapest(costs: Costs) -> frozenset[int]:
    """The positions of the units that are better left in float.

    A small gain pays beside integers, and not between floats:

    >>> slow, fast = Unit((0,), 8.0, 10.0), Unit((1,), 20.0, 90.0)
    >>> sorted(_cheapest(Costs((slow, fast), (Value(0, (1,), 2.0, 2.0),))))
    []
    >>> sorted(_cheapest(Costs((slow,), (Value(None, (0,), 2.0, 2.0), Value(0, (None,), 2.0, 2.0)))))
    [0]
    """
    network = Network()
    nodes = [network.add_node() for _ in costs.units]
    for node, unit in zip(nodes, costs.units, strict=True):
        stays = math.inf if unit.kept else MARGIN * unit.floating + QUIET
        network.add_edge(_SOURCE, node, stays)
        network.add_edge(node, _SINK, unit.integer)
    for value in costs.values:
        _add_value(network, nodes, costs.units, value)
    integers = network.source_side()
    return frozenset(place for place, node in enumerate(nodes) if node not in integers)


def _add_value(network: Network, nodes: Sequence[int], units: Sequence[Unit], value: Value) -> None:
    producer, readers = _ends(units, value)
    giver = _SINK if producer is None else nodes[producer]
    takers = [_SINK if reader is None else nodes[reader] for reader in readers]
    if producer is not None:
        floats = network.add_node()
        is_direct = units[producer].gives_float and len(readers) == 1
        network.add_edge(giver, floats, 0.0 if is_direct else value.dequantize)
        for taker in takers:
            network.add_edge(floats, taker, math.inf)
    if any(reader is not None for reader in readers):
        integers = network.add_node()
        network.add_edge(integers, giver, value.quantize)
        for taker in takers:
            if taker != _SINK:
                network.add_edge(taker, integers, math.inf)


def _ends(units: Sequence[Unit], value: Value) -> tuple[int | None, tuple[int | None, ...]]:
    """Producer and readers, where integers would be passed; None: floats."""
    producer = value.producer
    if producer is not None and units[producer].gives_float:
        producer = None if not _passes_integers(units, value) else producer
    readers = tuple(
        None if reader is None or units[reader].takes_float else reader for reader in value.readers
    )
    return producer, readers


def _passes_integers(units: Sequence[Unit], value: Value) -> bool:
    """A kernel that gives floats as well gives integers to readers that want them."""
    assert value.producer is not None
    wants = [r for r in value.readers if r is not None and not units[r].takes_float]
    return bool(wants) and not units[value.producer].takes_float


def _converted(costs: Costs, floats: frozenset[int], value: Value) -> float:
    """What the conversions of a value cost when the units ``floats`` are in float."""
    producer, readers = _ends(costs.units, value)
    given = producer is not None and producer not in floats
    taken = [reader is not None and reader not in floats for reader in readers]
    if given:
        direct = producer is not None and costs.units[producer].gives_float
        return 0.0 if all(taken) or (direct and not any(taken)) else value.dequantize
    return value.quantize if any(taken) else 0.0


def total(costs: Costs, floats: frozenset[int]) -> float:
    """Microseconds of all units and conversions when the units ``floats`` are in float.

    >>> total(Costs((Unit((0,), 5.0, 7.0),), (Value(None, (0,), 1.0, 1.0),)), frozenset())
    6.0
    """
    own = (u.floating if i in floats else u.integer for i, u in enumerate(costs.units))
    return sum(own) + sum(_converted(costs, floats, value) for value in costs.values)


def slower_than_float(plan: Plan, costs: Costs) -> dict[int, Reason]:
    """The reasons of operators that are slower on integers than in float, by position of their match in
    ``plan``.

    The figures are those of the operators that would be converted together: on integers with every
    quantize and dequantize that they need there, and in float.
    """
    floats = in_float(costs)
    reasons: dict[int, Reason] = {}
    for region in _regions(costs, floats):
        touching = [v for v in costs.values if region & {v.producer, *v.readers}]
        integer = sum(costs.units[i].integer for i in region)
        integer += sum(_converted(costs, floats - region, value) for value in touching)
        floating = sum(costs.units[i].floating for i in region)
        floating += sum(_converted(costs, floats, value) for value in touching)
        matches = [match for unit in sorted(region) for match in costs.units[unit].matches]
        for match in matches:
            reasons[match] = _reason(plan, match, len(matches), integer, floating)
    return reasons


def slower_as_a_whole(
    plan: Plan, costs: Costs, factor: float, integer: float, floating: float
) -> dict[int, Reason]:
    """The reasons of operators that are left in float so that the whole is not slower than float, by
    position of their match.

    For a model that is slower as a whole than the times of its operators suggested. Only those stay on
    integers that would still be faster if their kernels and conversions took ``factor`` times as long.
    ``integer``, ``floating``: microseconds of the whole model, quantized and in float.
    """
    units = tuple(replace(unit, integer=factor * unit.integer) for unit in costs.units)
    values = tuple(
        replace(value, quantize=factor * value.quantize, dequantize=factor * value.dequantize)
        for value in costs.values
    )
    matches = [match for i in in_float(Costs(units, values)) for match in costs.units[i].matches]
    reason = all_slower(integer, floating)
    return {match: replace(reason, node=plan.matches[match].anchor) for match in sorted(matches)}


def all_slower(integer: float, floating: float) -> Reason:
    """Why a whole model is left in float that takes so many microseconds on integers, and in float.

    >>> all_slower(9.0, 8.0).admitted
    'float: 8.0 µs'
    """
    return _slower(
        "",
        f"integers: {integer:.1f} µs for the whole model, where it pays the least here",
        floating,
    )


def nothing_gained(integer: float, floating: float, share: float) -> Reason:
    """Why a whole model is left in float of which integers would compute only this ``share``, no faster.

    >>> nothing_gained(8.1, 8.0, 0.001).asked
    'integers: 8.1 µs for the whole model, with 0.1 % of its multiply-adds on them'
    """
    work = f"with {100 * share:.1g} % of its multiply-adds on them"
    return _slower("", f"integers: {integer:.1f} µs for the whole model, {work}", floating)


def _reason(plan: Plan, match: int, count: int, integer: float, floating: float) -> Reason:
    beside = "one operator" if count == 2 else f"{count - 1} operators"
    together = f", with {beside} beside it" if count > 1 else ""
    asked = f"integers: {integer:.1f} µs with what it takes to quantize and dequantize{together}"
    return _slower(plan.matches[match].anchor, asked, floating)


def _slower(node: str, asked: str, floating: float) -> Reason:
    return Reason(
        node,
        ReasonCode.SLOWER_THAN_FLOAT,
        asked,
        f"float: {floating:.1f} µs",
        fix='quantize(..., slower="keep") keeps it on integers',
        place="measured here, on the example inputs",
    )


def _regions(costs: Costs, floats: frozenset[int]) -> list[frozenset[int]]:
    """The units ``floats``, grouped by the values that they pass to each other."""
    beside: Mapping[int, set[int]] = {unit: set() for unit in floats}
    for value in costs.values:
        ends = [end for end in (value.producer, *value.readers) if end in floats]
        for end in ends:
            if end is not None:
                beside[end].update(e for e in ends if e is not None)
    found, seen = [], set[int]()
    for unit in sorted(floats):
        if unit in seen:
            continue
        region, waiting = {unit}, [unit]
        while waiting:
            more = beside[waiting.pop()] - region
            region |= more
            waiting += more
        seen |= region
        found.append(frozenset(region))
    return found


# The cheapest way to cut a network in two.
#
# Source: Dinic 1970, "Algorithm for solution of a problem of maximum flow in networks with power estimation";
# the smallest source side of a minimum cut is what the source still reaches once the flow is greatest.

_ROUNDING = 1e-9


class Network:
    """Nodes 0 (source), 1 (sink) and those that ``add_node`` gives; edges with capacities.

    >>> network = Network()
    >>> node = network.add_node()
    >>> network.add_edge(0, node, 2.0), network.add_edge(node, 1, 3.0)
    (None, None)
    >>> node in network.source_side(), 1 in network.source_side()
    (False, False)
    """

    def __init__(self) -> None:
        # for each node, the indices of its edges in the two lists below
        self._edges: list[list[int]] = [[], []]
        self._to: list[int] = []
        self._left: list[float] = []  # remaining capacity; each edge is followed by its reverse

    def add_node(self) -> int:
        self._edges.append([])
        return len(self._edges) - 1

    def add_edge(self, start: int, end: int, capacity: float) -> None:
        """``capacity``: what it costs to cut the edge; ``math.inf``: it is never cut."""
        for here, there, left in ((start, end, capacity), (end, start, 0.0)):
            self._edges[here].append(len(self._to))
            self._to.append(there)
            self._left.append(left)

    def source_side(self) -> frozenset[int]:
        """The nodes on the source's side of the cheapest cut; of several such cuts, the fewest nodes."""
        levels = self._levels()
        while levels[1] >= 0:
            tried = [0] * len(self._edges)
            while self._push(levels, tried):
                pass
            levels = self._levels()
        return frozenset(node for node, level in enumerate(levels) if level >= 0)

    def _levels(self) -> list[int]:
        """How far each node is from the source over edges with capacity left; -1: not to be reached."""
        levels = [-1] * len(self._edges)
        levels[0] = 0
        waiting = deque([0])
        while waiting:
            node = waiting.popleft()
            for edge in self._edges[node]:
                there = self._to[edge]
                if levels[there] < 0 and self._left[edge] > _ROUNDING:
                    levels[there] = levels[node] + 1
                    waiting.append(there)
        return levels

    def _push(self, levels: list[int], tried: list[int]) -> bool:
        """Send flow along one way from source to sink that goes up the levels; False: there is none.

        ``tried``: of each node, how many of its edges lead nowhere any more.
        """
        path: list[int] = []
        node = 0
        while node != 1:
            edge = self._onward(node, levels, tried)
            if edge is not None:
                path.append(edge)
                node = self._to[edge]
            elif path:
                node = self._to[path.pop() ^ 1]
                tried[node] += 1
            else:
                return False
        flow = min(self._left[edge] for edge in path)
        for edge in path:
            self._left[edge] -= flow
            self._left[edge ^ 1] += flow
        return True

    def _onward(self, node: int, levels: list[int], tried: list[int]) -> int | None:
        edges = self._edges[node]
        while tried[node] < len(edges):
            edge = edges[tried[node]]
            if self._left[edge] > _ROUNDING and levels[self._to[edge]] == levels[node] + 1:
                return edge
            tried[node] += 1
        return None
