"""What must not become 0 stays float by default: divisors, and what logarithms and inverse roots read.

``b + 1e-5`` before a division has a result at each ``b``. On integers the sum is rounded to a multiple of
its scale, 0 among them, and the division gives infinities or no numbers. A value counts as lost where the
smallest magnitude that it can have is below one step: as measured, or the positive number that it adds. What
it consists of, value by value, stays float with it, up to a layer or a sum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from torch import fx

from backquant.graph import GraphIndex
from backquant.graph.shapes import Range
from backquant.match.default_rules import ChosenRules, Draft, rules_for_reasons
from backquant.match.plan import Decision, Plan, Reason
from backquant.operators import find
from backquant.operators.index import find_root, moves_values
from backquant.pipeline.joins import Measured, is_rounded, step_of
from backquant.reason_codes import ReasonCode

_SHOWN = 3


class _Divisor(NamedTuple):
    """A value that ``reader`` cannot read as 0, and the operators that compute it, the last first.
    ``added``: the positive number that the last of them, moves apart, adds."""

    reader: fx.Node
    value: fx.Node
    chain: tuple[fx.Node, ...]
    added: float | None

    def rounded(self, plan: Plan) -> list[Decision]:
        """The decisions by which it would be rounded."""
        decisions = [plan.decisions.get(node.name) for node in (*self.chain, self.reader)]
        return [one for one in decisions if one is not None and is_rounded(one)]


class _Loss(NamedTuple):
    """The smallest magnitude that a value can have, and the step that it would be rounded to."""

    value: str
    least: float
    step: float


def rules_for_divisors(draft: Draft, measured: Measured) -> ChosenRules | None:
    """Rules that leave such values, and what reads them, in float; ``None`` where there are none."""
    found = _lossy(draft.graph, draft.plan, measured)
    why = "a divisor, or what a logarithm or an inverse root reads, would be rounded to 0"
    return rules_for_reasons(draft, {n: _reason(n, loss) for n, loss in found.items()}, why)


def note_of_divisors(module: fx.GraphModule, plan: Plan, measured: Measured) -> tuple[str, ...]:
    """A note on such values where a request quantizes them; none where there are none."""
    found = _lossy(GraphIndex(module), plan, measured)
    if not found:
        return ()
    kinds = dict.fromkeys(plan.decisions[name].operator for name in found)
    rules = "".join(f".set_object_type({kind}, None)" for kind in kinds)
    first, loss = next(iter(found.items()))
    return (
        f"{', '.join(list(found)[:_SHOWN])}: a divisor, or what a logarithm or an inverse root reads, is "
        f"rounded to 0 ({_reason(first, loss).asked}); in float: qconfig_mapping{rules}",
    )


def _lossy(graph: GraphIndex, plan: Plan, measured: Measured) -> dict[str, _Loss]:
    """The operators by which such a value would be rounded. Ranges are measured only where there are some."""
    divisors = [one for one in _divisors(graph, plan) if one.rounded(plan)]
    if not divisors:
        return {}
    ranges = measured(graph.module, {one.value.name for one in divisors})
    found: dict[str, _Loss] = {}
    for one in divisors:
        loss = _loss(plan, one, ranges.get(one.value.name))
        if loss is not None:
            names = (node.name for node in (*one.chain, one.reader))
            found |= {name: loss for name in names if _quantized(plan, name)}
    return found


def _quantized(plan: Plan, name: str) -> bool:
    decision = plan.decisions.get(name)
    return decision is not None and decision.quantized


def _divisors(graph: GraphIndex, plan: Plan) -> Iterator[_Divisor]:
    layers = {node for node in graph.calls() if _is_layer(graph, node)}
    matches = {plan.decisions[node.name].match for node in layers if node.name in plan.decisions}
    for node in graph.nodes.values():
        decision = plan.decisions.get(node.name)
        if decision is not None and decision.match is not None and decision.match in matches:
            layers.add(node)
    for node in graph.calls():
        key = graph.key(node)
        known = None if key is None else find(key.op)
        value = None if known is None else known.operand_at_pole(node)
        if value is not None:
            chain = tuple(_chain(graph, node, value, layers))
            yield _Divisor(node, value, chain, _added(graph, chain))


def _is_layer(graph: GraphIndex, node: fx.Node) -> bool:
    key = graph.key(node)
    known = None if key is None else find_root(key.op) if isinstance(key.op, type) else find(key.op)
    return known is not None and known.is_weighted


def _chain(
    graph: GraphIndex, reader: fx.Node, value: fx.Node, layers: Collection[fx.Node]
) -> Iterator[fx.Node]:
    """The operator that gives ``value``, and those before it of which nothing else is computed, back to
    where each value comes from more than those at its place, and to ``layers``, with what they fuse."""
    seen = {reader}
    waiting = [value]
    while waiting:
        node = waiting.pop()
        key = graph.key(node)
        known = None if key is None else find(key.op)
        if key is None or node in seen or node in layers:
            continue
        if not (node is value or seen.issuperset(node.users)):
            continue
        seen.add(node)
        yield node
        if moves_values(key.op) or (known is not None and known.keeps_places):
            waiting += node.all_input_nodes


def _added(graph: GraphIndex, chain: Sequence[fx.Node]) -> float | None:
    for node in chain:
        key = graph.key(node)
        if key is not None and not moves_values(key.op):
            known = find(key.op)
            numbers = [one for one in node.args if isinstance(one, int | float) and one > 0]
            return numbers[0] if numbers and known is not None and known.name == "add" else None
    return None


def _loss(plan: Plan, one: _Divisor, measured: Range | None) -> _Loss | None:
    asked = one.rounded(plan)[0].asked_activation
    if measured is None or asked is None:
        return None
    low, high = measured
    least = low if low > 0 else -high
    if least <= 0:  # it may be 0 in float
        return None
    least = min(least, one.added or least)
    step = step_of(measured, asked)
    return _Loss(one.value.name, least, step) if least < step else None


def _reason(name: str, loss: _Loss) -> Reason:
    return Reason(
        name,
        ReasonCode.ROUNDED_TO_ZERO,
        f"{loss.value} in steps of {loss.step:.3g}; its smallest magnitude is {loss.least:.3g}",
        "no zero there: a division, a logarithm or an inverse root reads it",
        fix="add a larger number to it; a rule of yours quantizes it all the same",
        place="measured here, on the calibration data",
    )
