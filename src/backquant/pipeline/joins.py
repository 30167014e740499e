"""Operators that share qparams among values of very different ranges stay float by default.

A concatenation of boxes in pixels and scores of 0 to 1 has one scale, in which each score is 0. Ranges are
measured: a value that keeps fewer than ``LEAST_STEPS`` steps of the shared scale counts as lost. So does what
keeps the parts at their places (an activation, a sum, a pool of it), and stays float with it. Joins that only
layers read stay quantized: the input of a layer has one scale anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import fx

from backquant.dtypes import find_dtype, quantize_bounds
from backquant.graph import GraphIndex
from backquant.graph.shapes import Range
from backquant.match.default_rules import ChosenRules, Draft, rules_for_reasons
from backquant.match.plan import Decision, Outcome, Plan, Reason, TensorRequest
from backquant.operators import find
from backquant.reason_codes import ReasonCode

#: Of 255. The error is up to 1/40 of the part's range: 26 dB of SQNR where its values are evenly spread.
LEAST_STEPS = 20
_SHARES = "OUTPUT_SHARE_OBSERVER_WITH_INPUT"
_SHOWN = 3
#: Operators of one value whose number may be larger than that, by name.
_WITH_NUMBERS = frozenset({"pad", "clamp", "hardtanh", "masked_fill", "where"})


#: The ranges of the values of a graph that are named, on some data.
Measured = Callable[[fx.GraphModule, Collection[str]], Mapping[str, Range]]


class _Loss(NamedTuple):
    """A value that loses most of its range, and the range that it shares."""

    value: str
    own: Range
    shared: Range
    steps: float


def rules_for_joins(draft: Draft, measured: Measured) -> ChosenRules | None:
    """Rules that leave such operators in float; ``None`` where there are none."""
    found = _lossy(draft.graph, draft.plan, measured)
    why = f"one scale would leave a part of what they join fewer than {LEAST_STEPS} steps"
    return rules_for_reasons(draft, {n: _reason(n, loss) for n, loss in found.items()}, why)


def note_of_joins(module: fx.GraphModule, plan: Plan, measured: Measured) -> tuple[str, ...]:
    """A note on what such operators lose where a request quantizes them; none where that is little."""
    found = _lossy(GraphIndex(module), plan, measured)
    if not found:
        return ()
    words = [_reason(name, loss).asked for name, loss in list(found.items())[:_SHOWN]]
    kinds = dict.fromkeys(plan.decisions[name].operator for name in found)
    rules = "".join(f".set_object_type({kind}, None)" for kind in kinds)
    return (
        f"one scale leaves a part of {', '.join(list(found)[:_SHOWN])} fewer than {LEAST_STEPS} steps, on "
        f"the example inputs ({'; '.join(words)}); in float: "
        f"qconfig_mapping{rules}",
    )


def _lossy(graph: GraphIndex, plan: Plan, measured: Measured) -> dict[str, _Loss]:
    """The operators in which a part is lost. Ranges are measured only where there may be some."""
    joins = [node for node in graph.graph.nodes if _shares(plan.decisions.get(node.name))]
    in_float = [node for node in graph.graph.nodes if _joins_in_float(graph, node, plan)]
    followers = _followers(graph, [*joins, *in_float])
    if not joins and not any(is_rounded(plan.decisions.get(node.name)) for node in followers):
        in_float = []
    if not any(_may_differ(graph, node, plan) for node in (*joins, *in_float)):
        return {}
    around = {value.name for node in (*joins, *in_float) for value in (node, *node.all_input_nodes)}
    ranges = measured(graph.module, around)
    return _Joins(graph.graph, joins, in_float, followers, plan, ranges).lossy()


def _joins_in_float(graph: GraphIndex, node: fx.Node, plan: Plan) -> bool:
    key = graph.key(node)
    known = None if key is None else find(key.op)
    is_join = known is not None and known.name in ("cat", "stack")
    return is_join and _outcome(plan, node) is Outcome.FLOAT


def _followers(graph: GraphIndex, joins: Sequence[fx.Node]) -> set[fx.Node]:
    """What comes after joins, with each part still at its place."""
    found = set[fx.Node](joins)
    for node in graph.graph.nodes:
        key = graph.key(node)
        known = None if key is None else find(key.op)
        if known is not None and known.keeps_places and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found.difference(joins)


def _shares(decision: Decision | None) -> bool:
    return decision is not None and decision.observation == _SHARES and is_rounded(decision)


def is_rounded(decision: Decision | None) -> bool:
    """Whether a plan rounds the result of an operator to integers of one scale."""
    if decision is None or not decision.quantized:
        return False
    asked = decision.asked_activation
    return asked is not None and not asked.is_dynamic and _is_integer(asked.dtype)


def _is_integer(dtype: torch.dtype) -> bool:
    """Narrow floats keep small values beside large ones."""
    row = find_dtype(dtype)
    return row is not None and row.is_integer


def _may_differ(graph: GraphIndex, node: fx.Node, plan: Plan) -> bool:
    """Whether ranges can differ around a node that shares qparams: it joins values, puts numbers beside,
    or rounds what was not rounded before."""
    key, inputs = graph.key(node), node.all_input_nodes
    known = None if key is None else find(key.op)
    if len(inputs) > 1 or (known is not None and known.name in _WITH_NUMBERS):
        return True
    return any(_outcome(plan, value) is not Outcome.QUANTIZED for value in inputs)


def _outcome(plan: Plan, node: fx.Node) -> Outcome | None:
    decision = plan.decisions.get(node.name)
    return None if decision is None else decision.outcome


class _Joins:
    """Operators that share qparams, in graph order, and the ranges around them."""

    def __init__(
        self,
        graph: fx.Graph,
        joins: Sequence[fx.Node],
        in_float: Sequence[fx.Node],
        followers: set[fx.Node],
        plan: Plan,
        ranges: Mapping[str, Range],
    ) -> None:
        self.plan, self.ranges, self.followers, self.in_float = plan, ranges, followers, {*in_float}
        rounded = {node for node in followers if _outcome(plan, node) is not Outcome.FLOAT}
        holding = rounded.union(joins)
        self.holding = [node for node in graph.nodes if node in holding]
        self.narrowing = {node for node in joins if self._loss(node, [node]) is not None}
        self.kept = set[fx.Node]()
        for node in reversed(self.holding):
            if any(self._keeps(user) for user in node.users):
                self.kept.add(node)

    def _keeps(self, user: fx.Node) -> bool:
        """Whether a reader would see more of a part, if what it reads had no single scale. A layer sees no
        more: its input has one."""
        if user.op == "output" or _outcome(self.plan, user) is Outcome.FLOAT:
            return True
        return user in self.narrowing or user in self.kept

    def lossy(self) -> dict[str, _Loss]:
        """What is better left in float, with the part that would lose most."""
        found: dict[str, _Loss] = {}
        for node in self.holding:
            inputs = node.all_input_nodes
            lost_before = [found[value.name] for value in inputs if value.name in found]
            lost_before += self._lost_of_float(node)
            unrounded = lost_before or any(
                _outcome(self.plan, value) is not Outcome.QUANTIZED for value in inputs
            )
            loss = None
            if node in self.followers:
                loss = lost_before[0] if lost_before and node in self.kept else None
            elif node in self.narrowing and unrounded:
                loss = self._loss(node, [node])
            elif node in self.kept:
                loss = lost_before[0] if lost_before else self._loss(node, inputs)
            if loss is not None:
                found[node.name] = loss
        return found

    def _lost_of_float(self, node: fx.Node) -> list[_Loss]:
        """What one scale for ``node`` takes from parts that were joined in float."""
        asked = self.plan.decisions[node.name].asked_activation
        remaining, found, seen = list(node.all_input_nodes), list[_Loss](), set[fx.Node]()
        while remaining:
            value = remaining.pop()
            if value in seen or _outcome(self.plan, value) is not Outcome.FLOAT:
                continue
            seen.add(value)
            if value in self.followers:
                remaining += value.all_input_nodes
            elif value in self.in_float and (
                loss := self._loss(value, value.all_input_nodes, asked)
            ):
                found.append(loss)
        return found

    def _loss(
        self, node: fx.Node, parts: Sequence[fx.Node], asked: TensorRequest | None = None
    ) -> _Loss | None:
        """What loses most, of ``parts``, in one scale for what ``node`` reads and gives. ``asked``: of what
        rounds that; default: of ``node``."""
        around = (node, *node.all_input_nodes)
        seen = [self.ranges[value.name] for value in around if value.name in self.ranges]
        asked = asked or self.plan.decisions[node.name].asked_activation
        if not seen or asked is None:
            return None
        shared = min(low for low, _ in seen), max(high for _, high in seen)
        step = step_of(shared, asked)
        known = {part.name: self.ranges[part.name] for part in parts if part.name in self.ranges}
        losses = [
            _Loss(name, own, shared, _width(own) / step) for name, own in known.items() if step > 0
        ]
        lost = [loss for loss in losses if 0 < loss.steps < LEAST_STEPS]
        return min(lost, key=lambda loss: loss.steps, default=None)


def step_of(values: Range, asked: TensorRequest) -> float:
    """The scale that a request gives to values of this range."""
    low, high = quantize_bounds(asked.dtype)
    low = low if asked.quant_min is None else asked.quant_min
    high = high if asked.quant_max is None else asked.quant_max
    if "symmetric" in asked.qscheme:
        return 2 * max(abs(end) for end in values) / (high - low)
    return _width(values) / (high - low)


def _width(values: Range) -> float:
    """Of the range with 0, which each integer dtype has to hold."""
    return max(values[1], 0.0) - min(values[0], 0.0)


def _reason(name: str, loss: _Loss) -> Reason:
    (low, high), (shared_low, shared_high) = loss.own, loss.shared
    return Reason(
        name,
        ReasonCode.SHARED_RANGE,
        f"one scale for {shared_low:.4g} to {shared_high:.4g}, in which {loss.value} with "
        f"{low:.4g} to {high:.4g} has {loss.steps:.1f} steps",
        f"at least {LEAST_STEPS} steps for each part",
        fix="bring the parts to one range before they are joined; a rule of yours quantizes it all the same",
        place="measured here, on the calibration data",
    )
