"""What is slower on integers in runtimes that are not timed here, as their descriptions say it.

ONNX Runtime and XNNPACK run exported files, often elsewhere: ``quantize`` has no kernels of theirs to time,
and a race of exported files would make each ``quantize`` several times as long. That small or unusual sizes
lose is a fact about a runtime's kernels, so it stands in the description (``BackendConfig.slower``), and in
each that extends it. What such a record names is left in float with its figures as the reason; a model of
which nothing else would be on integers is given back in float.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from backquant.backend_config import BackendConfig, KnownSlower
from backquant.errors import CoverageError
from backquant.graph import GraphIndex
from backquant.graph.shapes import GraphValues
from backquant.match.conditions import unmet
from backquant.match.plan import MatchKind, Plan, Reason
from backquant.operators.facts import UseFacts
from backquant.operators.index import find, find_root
from backquant.operators.operator import Operator
from backquant.reason_codes import ReasonCode
from backquant.runtime import QuantizedModel
from backquant.speed.against_float import ModelFactories, noted
from backquant.speed.cost_table import Kept

_TOO_MUCH = (
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
    return noted(made, _TOO_MUCH) if whole is None else noted(whole, _NOTHING_ELSE)


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
