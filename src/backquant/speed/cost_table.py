"""Times of nodes as the costs of what ``match`` decides about.

A match may be several kernels, and a kernel may run several matches (a convolution with the addition that
follows): matches that share a kernel are one unit. Operators that no kernel runs are in float in either case.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.fx import Graph, GraphModule, Node

from backquant.graph import get_module
from backquant.lower.kernels.boundary import dequantize, quantize
from backquant.match.plan import Decision, Match, MatchKind, Outcome, RuleKind
from backquant.match.slower import MARGIN, QUIET, Costs, Unit, Value
from backquant.runtime import QuantizedModel
from backquant.runtime.replay.timed import Clock, nothing, replayed

_LOWERED = "_lowered"
_BY_NAME = (
    RuleKind.MODULE_NAME,
    RuleKind.MODULE_NAME_REGEX,
    RuleKind.MODULE_NAME_OBJECT_TYPE_ORDER,
)
# Kernels that give floats as well as integers.
_EITHER = ("onednn.q", "backquant.")
_SIZES = 1 << 12, 1 << 18  # elements
_MICRO = 1e6


class TimedGraph(Protocol):
    """A graph with the ``seconds`` of its nodes and the ``sizes`` of their results, by name."""

    @property
    def module(self) -> GraphModule: ...
    @property
    def seconds(self) -> Mapping[str, float]: ...
    @property
    def sizes(self) -> Mapping[str, int]: ...


class Conversions(Protocol):
    """Microseconds to convert so many elements."""

    def quantize(self, size: int) -> float: ...
    def dequantize(self, size: int) -> float: ...


@dataclass(frozen=True)
class Times:
    """``floats``: of the float graph, whose nodes the plan names. ``integers``: of the lowered graph.
    ``multiply_adds``: by node of the float graph."""

    floats: TimedGraph
    integers: TimedGraph
    multiply_adds: Mapping[str, int]
    conversions: Conversions


def cost_table(
    quantized: QuantizedModel, times: Times, *, keep: Sequence[str] = (), keep_named: bool = False
) -> Costs:
    """The costs of all quantized matches of ``quantized.plan``.

    ``keep``: modules that stay on integers; ``keep_named``: so do those that a rule names.
    """
    table = _Table(quantized, times, Kept(tuple(keep), keep_named))
    return Costs(
        tuple(table.units(times.floats, times.integers)),
        tuple(table.values(times.floats.sizes, times.conversions)),
    )


@dataclass(frozen=True)
class Kept:
    """What stays on integers whatever it costs."""

    modules: tuple[str, ...]
    named: bool

    def holds(self, decision: Decision) -> bool:
        path, rule = f"{decision.module_path}.", decision.rule
        inside = any(path.startswith(f"{name}.") for name in self.modules)
        return inside or (self.named and rule is not None and rule.kind in _BY_NAME)


class _Table:
    def __init__(self, quantized: QuantizedModel, times: Times, kept: Kept) -> None:
        self.kept = kept
        self.plan, self.backend = quantized.plan, quantized.backend_config
        self.graph: Graph = times.floats.module.graph
        self.nodes = {node.name: node for node in self.graph.nodes}
        self.work = times.multiply_adds
        self.kernels = quantized.kernels
        self.left = [reason.node for reason in quantized.left_in_float]
        self.match_of: dict[str, int] = {}
        for index, match in enumerate(self.plan.matches):
            if match.kind is MatchKind.PATTERN and self.plan.decisions[match.anchor].quantized:
                self.match_of.update(dict.fromkeys(match.nodes, index))
        self._follow_kernels()
        self._follow_items()
        groups = self._groups()
        self.groups = list(groups.values())
        self.unit_of = {match: place for place, group in enumerate(self.groups) for match in group}

    def _follow_items(self) -> None:
        """A part of the tuple that a match gives belongs to it."""
        for node in self.graph.nodes:
            if node.target is operator.getitem and node.name not in self.match_of:
                source = node.args[0]
                if isinstance(source, Node) and source.name in self.match_of:
                    self.match_of[node.name] = self.match_of[source.name]

    def _follow_kernels(self) -> None:
        """What a kernel runs beside its matches belongs to them: a ReLU that the plan leaves in float
        and the lowering fuses. A kernel without a match is decided by its neighbours."""
        for place, use in enumerate(self.kernels, len(self.plan.matches)):
            own = next((self.match_of[n] for n in use.nodes if n in self.match_of), place)
            for name in use.nodes:
                self.match_of.setdefault(name, own)

    def _groups(self) -> dict[int, list[int]]:
        """The matches by the first of those that share its kernel."""
        first = {match: match for match in self.match_of.values()}
        for use in self.kernels:
            matches = [self.match_of[name] for name in use.nodes]
            for one, other in itertools.pairwise(matches):
                first[_root(first, other)] = _root(first, one)
        groups: dict[int, list[int]] = {}
        for match in sorted(first):
            groups.setdefault(_root(first, match), []).append(match)
        return groups

    def units(self, floats: TimedGraph, integers: TimedGraph) -> Iterator[Unit]:
        on_integers = self._sums(integers)
        in_float = self._sums(floats)
        either = self._give_either()
        without = self._without_kernel()
        nodes = self._nodes()
        for place, group in enumerate(self.groups):
            known = [index for index in group if index < len(self.plan.matches)]
            matches = [self.plan.matches[index] for index in known]
            by_itself = bool(matches) and all(self._converts_by_itself(match) for match in matches)
            floating = in_float.get(place, 0.0)
            integer = on_integers.get(place, 0.0)
            if place in without:
                integer = max(integer, MARGIN * floating + 2 * QUIET)
            yield Unit(
                tuple(known),
                integer,
                floating,
                kept=any(self._is_kept(match) for match in matches),
                takes_float=by_itself,
                gives_float=by_itself or place in either,
                multiply_adds=sum(self.work.get(name, 0) for m in matches for name in m.nodes),
                weights=sum(self._weights(floats.module, m) for m in matches),
                nodes=tuple(nodes[place]),
            )

    def _nodes(self) -> list[list[str]]:
        """The nodes of each unit: those of its matches, and what its kernels run beside them."""
        found: list[list[str]] = [[] for _ in self.groups]
        for name, match in self.match_of.items():
            found[self.unit_of[match]].append(name)
        return found

    def _weights(self, module: GraphModule, match: Match) -> int:
        nodes = (self.nodes[name] for name in match.nodes if name in self.nodes)
        called = (str(node.target) for node in nodes if node.op == "call_module")
        modules = (get_module(module, path) for path in called)
        return sum(tensor.numel() for each in modules for tensor in each.parameters())

    def _sums(self, times: TimedGraph) -> dict[int, float]:
        """Microseconds by unit. A runtime may name operators that have no node in the lowered graph."""
        found: dict[int, float] = {}
        nodes = {node.name: node for node in times.module.graph.nodes}
        for name, seconds in times.seconds.items():
            match = self._match(nodes[name]) if name in nodes else self.match_of.get(name)
            if match is not None:
                unit = self.unit_of[match]
                found[unit] = found.get(unit, 0.0) + _MICRO * seconds
        return found

    def _match(self, node: Node) -> int | None:
        """The match that a node of either graph belongs to; a weight that is computed, and quantized at each
        call, to who reads it."""
        while getattr(node.target, "namespace", "") == "quantized_decomposed" and node.users:
            node = next(iter(node.users))
        found = self.match_of.get(node.name)
        return self.match_of.get(node.name.partition(_LOWERED)[0]) if found is None else found

    def _without_kernel(self) -> set[int]:
        """The units that the plan quantizes and for which the engine has no kernel: they run as in the
        reference model, in float on values that are quantized and dequantized first."""
        run = {name for use in self.kernels for name in use.nodes}
        left = {self.match_of.get(name) for name in self.left}
        return {
            place
            for place, group in enumerate(self.groups)
            if not left.isdisjoint(group)
            and not any(self._runs(index, run) for index in group if index < len(self.plan.matches))
        }

    def _runs(self, index: int, run: set[str]) -> bool:
        return not run.isdisjoint(self.plan.matches[index].nodes)

    def _give_either(self) -> set[int]:
        """The units whose last kernel gives floats where no integers are wanted."""
        return {
            self.unit_of[self.match_of[use.nodes[-1]]]
            for use in self.kernels
            if use.kernel.startswith(_EITHER)
        }

    def _converts_by_itself(self, match: Match) -> bool:
        """Whether floats go in and out of what is quantized: dynamically, or in its weights only."""
        chosen = self.plan.decisions[match.anchor].dtype_config
        if chosen is None:
            return False
        config = self.backend.shared_configs[match.entry].dtype_configs[chosen]
        return bool(config.is_dynamic) or config.input_dtype in (None, torch.float)

    def _is_kept(self, match: Match) -> bool:
        return any(self.kept.holds(self.plan.decisions[name]) for name in match.nodes)

    def values(self, sizes: Mapping[str, int], conversion: Conversions) -> Iterator[Value]:
        """One for each tensor of floats that goes from one unit, or from elsewhere, to units. Constants are
        left out: nearly all are weights, which are packed once."""
        for node in self.graph.nodes:
            if node.name not in sizes or node.op == "get_attr":
                continue
            producer = self._unit(node)
            readers = {
                self._unit(user)
                for user in node.users
                if not self._computes_no_tensor(user)
                and (producer is None or self._unit(user) != producer)
            }
            if readers and (producer is not None or readers != {None}):
                yield Value(
                    producer,
                    tuple(sorted(readers, key=lambda unit: -1 if unit is None else unit)),
                    conversion.quantize(sizes[node.name]),
                    conversion.dequantize(sizes[node.name]),
                    node.name,
                )

    def _unit(self, node: Node) -> int | None:
        match = self.match_of.get(node.name)
        return None if match is None else self.unit_of[match]

    def _computes_no_tensor(self, node: Node) -> bool:
        decision = self.plan.decisions.get(node.name)
        return decision is not None and decision.outcome is Outcome.NOT_TENSOR


def _root(first: dict[int, int], match: int) -> int:
    while first[match] != match:
        first[match] = first[first[match]]
        match = first[match]
    return match


class TimedConversions:
    """Lines through two measurements each of a quantize and a dequantize, here; without what a call takes.

    >>> round(TimedConversions(lambda run: 3e-6 if run().numel() else 1e-6).quantize(100), 3)
    2.0
    """

    def __init__(self, clock: Clock) -> None:
        called = clock(nothing())
        self._quantize = _line([clock(_quantizing(size)) - called for size in _SIZES])
        self._dequantize = _line([clock(_dequantizing(size)) - called for size in _SIZES])

    def quantize(self, size: int) -> float:
        """Microseconds for so many elements."""
        start, slope = self._quantize
        return start + slope * size

    def dequantize(self, size: int) -> float:
        """Microseconds for so many elements."""
        start, slope = self._dequantize
        return start + slope * size


def _line(seconds: list[float]) -> tuple[float, float]:
    small, large = (_MICRO * max(0.0, each) for each in seconds)
    slope = max(0.0, (large - small) / (_SIZES[1] - _SIZES[0]))
    return max(0.0, small - slope * _SIZES[0]), slope


def _quantizing(size: int) -> Callable[[], object]:
    return replayed(_quantize, torch.linspace(0.0, 1.0, size))


def _dequantizing(size: int) -> Callable[[], object]:
    return replayed(_dequantize, torch.zeros(size, dtype=torch.uint8))


def _quantize(x: torch.Tensor) -> torch.Tensor:
    return quantize(x, 0.01, 0, 0, 255, torch.uint8)


def _dequantize(x: torch.Tensor) -> torch.Tensor:
    return dequantize(x, 0.01, 0, 0, 255, torch.uint8)
