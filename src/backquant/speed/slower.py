"""What does not pay: operators that are slower on integers here than in float are left in float.

The kernels of a lowered model and the operators of its float graph are timed on the example inputs, each
kernel shape once; ``match`` decides (``slower_than_float``). Where that promises enough, the model is
converted again. At last the whole of both is timed beside the float model (``against_float``): the second
stands only if it is clearly faster.

1. Off where a mapping was passed, unless ``slower="float"`` asks for it; operators that the mapping names
   stay as it says.
2. Off without an engine, and for models whose work is too small to time (``LEAST``).
3. Where less than is required would stay on integers, the model stays as it was, with a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx, nn

from backquant.backend_config import BackendConfig, KnownSlower
from backquant.errors import CoverageError, UsageError
from backquant.graph import GraphIndex, as_arguments
from backquant.graph.shapes import GraphValues
from backquant.match.conditions import unmet
from backquant.match.plan import MatchKind, Plan, Reason
from backquant.match.slower import Costs, slower_than_float, total
from backquant.operators.facts import UseFacts
from backquant.operators.index import find, find_root
from backquant.operators.operator import Operator
from backquant.prepare import PreparedModule, unobserved
from backquant.reason_codes import ReasonCode
from backquant.runtime import QuantizedModel
from backquant.runtime.replay.timed import NodeTimes
from backquant.speed.against_float import Chosen, ModelFactories, Timing, not_slower, noted
from backquant.speed.cost_table import Kept, TimedConversions, Times, cost_table

_CHOICES = ("float", "keep")
_PROMISED = 0.015  # of the model's time: what promises less is not converted again
_MUCH = 0.1  # of the time of a model with long calls: what promises more is faster as a whole, too
_ROUNDS = 2  # in each of which an operator runs up to six times
_LONG = 0.25  # seconds of both graphs after which one round is enough
_TOO_MUCH = (
    "measured on the example inputs, less than required is faster on integers than in float: "
    "what is slower stays on integers, too"
)


def slower_choice(slower: Any, has_mapping: bool) -> bool:
    """Whether what is slower than float is to be left in float. Raises ``UsageError``.

    >>> slower_choice(None, has_mapping=False), slower_choice(None, has_mapping=True)
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


TIMING = Timing()


def the_faster(
    made: QuantizedModel,
    ways: ModelFactories,
    prepared: PreparedModule,
    original: nn.Module,
    example: Any,
    timing: Timing,
) -> QuantizedModel:
    """``made``, or what ``ways`` make without what is slower on integers, if that is faster.

    ``original``: the float model in evaluation mode, than which the result as a whole is not slower, unless
    something is required.
    """
    costs, seconds, is_long = _measured(prepared, made, example, timing)
    chosen = None
    reasons = _reasons(made, costs)
    promised = _promised(costs, reasons) / (1e6 * seconds) if seconds else 0.0
    if promised > _PROMISED:
        try:
            after = ways.without(reasons)
        except CoverageError:
            return noted(made, _TOO_MUCH)
        chosen = Chosen(after, reasons, is_faster=is_long and promised > _MUCH)
    return not_slower(made, chosen, ways, costs, original, example, timing)


def _measured(
    prepared: PreparedModule, made: QuantizedModel, example: Any, timing: Timing
) -> tuple[Costs, float, bool]:
    """The costs of all that is quantized, the seconds of the lowered graph, and whether calls are long."""
    args, kwargs = as_arguments(example)
    counted = made.record.costs
    assert counted is not None
    integers = NodeTimes(made.graph_module, args, kwargs, walks=None)
    walks = integers.is_walked
    floats = NodeTimes(unobserved(prepared), args, kwargs, packs=False, walks=walks)
    conversions = TimedConversions(timing.clock)
    for _ in range(_ROUNDS):
        floats.measure(timing.clock)
        integers.measure(timing.clock)
        if sum(floats.seconds.values()) + sum(integers.seconds.values()) > _LONG:
            break
    times = Times(floats, integers, counted.multiply_adds, conversions)
    costs = cost_table(made, times, keep=timing.keep, keep_named=timing.keep_named)
    return costs, sum(integers.seconds.values()), walks


def _promised(costs: Costs, reasons: Mapping[int, Reason]) -> float:
    """Microseconds that the matches of ``reasons`` take less in float."""
    units = enumerate(costs.units)
    floats = frozenset(i for i, unit in units if not reasons.keys().isdisjoint(unit.matches))
    return total(costs, frozenset()) - total(costs, floats)


def _reasons(quantized: QuantizedModel, costs: Costs) -> dict[int, Reason]:
    """The reasons of what is slower on integers, by position of the match; where the engine has no kernel
    for it, that is the reason."""
    plan = quantized.plan
    run = {name for use in quantized.kernels for name in use.nodes}
    left = {reason.node: reason for reason in quantized.left_in_float}
    found = slower_than_float(plan, costs)
    for match, reason in found.items():
        nodes = plan.matches[match].nodes
        refused = [left[name] for name in nodes if name in left]
        if refused and run.isdisjoint(nodes):
            found[match] = replace(refused[0], node=reason.node)
    return found


# What is slower on integers in runtimes that are not timed here, as their descriptions say it.
#
# ONNX Runtime and XNNPACK run exported files, often elsewhere: ``quantize`` has no kernels of theirs to time,
# and a race of exported files would make each ``quantize`` several times as long. That small or unusual sizes
# lose is a fact about a runtime's kernels, so it stands in the description (``BackendConfig.slower``), and in
# each that extends it. What such a record names is left in float with its figures as the reason; a model of
# which nothing else would be on integers is given back in float.

_TOO_MUCH_KNOWN = (
    "less than required is faster on integers than in float: what is known to be slower there stays on "
    "integers, too"
)
_NOTHING_ELSE = (
    "what could run in int8 is known to be slower there: the model is returned, unchanged, in float"
)


def without_known_slower(
    made: QuantizedModel, ways: ModelFactories, floats: fx.GraphModule, kept: Kept
) -> QuantizedModel:
    """``made``, or what ``ways`` make without what is known to be slower on its runtime.

    ``floats``: the float graph that the plan of ``made`` is about.
    """
    reasons = known_slower(made.plan, made.backend_config, floats, kept)
    if not reasons:
        return made
    try:
        return ways.without(reasons)
    except CoverageError:
        pass
    try:
        whole = ways.in_float(replace(next(iter(reasons.values())), node=""))
    except CoverageError:
        whole = None
    return noted(made, _TOO_MUCH_KNOWN) if whole is None else noted(whole, _NOTHING_ELSE)


def known_slower(
    plan: Plan, backend: BackendConfig, floats: fx.GraphModule, kept: Kept
) -> dict[int, Reason]:
    """The reasons of quantized matches that ``backend.slower`` says are slower, by position."""
    if not backend.slower:
        return {}
    index, values = GraphIndex(floats), GraphValues(None)
    found = {}
    for position, match in enumerate(plan.matches):
        decision = plan.decisions[match.anchor]
        if match.kind is not MatchKind.PATTERN or not decision.quantized or kept.holds(decision):
            continue
        for name in match.nodes:
            node = index.nodes.get(name)
            operator = None if node is None else _operator(index, node)
            for place, record in enumerate(backend.slower):
                if node is None or operator is None or operator.name not in record.operators:
                    continue
                if not unmet(record.condition, UseFacts(index, values, node, node)):
                    found[position] = _reason(
                        match.anchor, f"{backend.name}: slower[{place}]", record
                    )
    return found


def _operator(index: GraphIndex, node: fx.Node) -> Operator | None:
    module = index.module_of(node)
    return find(node.target) if module is None else find_root(type(module))


def _reason(node: str, place: str, record: KnownSlower) -> Reason:
    return Reason(
        node,
        ReasonCode.SLOWER_THAN_FLOAT,
        f"integers: {record.integer_us:.1f} µs ({record.measured})",
        f"float: {record.float_us:.1f} µs",
        fix='quantize(..., slower="keep") keeps it on integers',
        place=f"{place}, not measured here",
    )
