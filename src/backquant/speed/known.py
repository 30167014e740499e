"""What is slower on integers in runtimes that are not timed here, as it was measured there once.

ONNX Runtime and XNNPACK run exported files, often elsewhere: ``quantize`` has no kernels of theirs to time,
and a race of exported files would make each ``quantize`` several times as long. That small or unusual sizes
lose is a fact about a runtime's kernels, so it stands here as data: operators, the condition on their sizes
(as in a dtype config), and both times of one measurement at these sizes. What such an entry names is left
in float with these figures as its reason; a model of which nothing else would be on integers is given back
in float.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from backquant.backend_config.conditions import condition_from
from backquant.errors import CoverageError
from backquant.graph import GraphIndex
from backquant.graph.values import GraphValues
from backquant.match.conditions import unmet
from backquant.match.plan import MatchKind, Plan, Reason
from backquant.operators.facts import UseFacts
from backquant.operators.index import find, find_root
from backquant.operators.operator import Operator
from backquant.reason_codes import ReasonCode
from backquant.runtime import QuantizedModel
from backquant.speed.against_float import Ways, noted
from backquant.speed.cost_table import Kept

_TOO_MUCH = (
    "less than required is faster on integers than in float: what is known to be slower there stays on "
    "integers, too"
)
_NOTHING_ELSE = (
    "what could be on integers is known to be slower there: the model is given back, as it came, in "
    "float"
)


@dataclass(frozen=True)
class KnownSlower:
    """``operators``, by name, are slower on integers where ``where`` holds, of which ``measured`` is one
    case: microseconds on integers, with what it takes to quantize and dequantize, and in float."""

    operators: tuple[str, ...]
    where: Mapping[str, Any]
    measured: str
    integer: float
    floating: float


#: By the name of the description; one thread of an AMD EPYC (Zen 4), benchmarks/LOG.md.
KNOWN: Mapping[str, tuple[KnownSlower, ...]] = {
    # DynamicQuantizeLSTM quantizes the hidden state at each step; from 64 values on it is faster
    "onnxruntime": (
        KnownSlower(
            ("lstm",),
            {"hidden_size": {"max": 63}},
            "ONNX Runtime 1.31, 32 values, 20 steps",
            20.0,
            18.0,
        ),
    ),
    # the delegate has depthwise kernels of up to 25 taps; in float larger ones are a sum of such
    "xnnpack": (
        KnownSlower(
            ("conv2d",),
            {
                "all": [{"groups": {"min": 2}}, {"groups": {"equals": "in_channels"}}],
                "product(kernel_size)": {"min": 26},
            },
            "ExecuTorch 1.5, depthwise, 7 × 7, 96 channels of 28 × 28",
            2440.0,
            380.0,
        ),
    ),
}


def without_known_slower(  # size: the model, what makes others of it, its float graph, and what stays
    made: QuantizedModel, ways: Ways, floats: fx.GraphModule, kept: Kept
) -> QuantizedModel:
    """``made``, or what ``ways`` make without what is known to be slower on its runtime.

    ``floats``: the float graph that the plan of ``made`` is about.
    """
    reasons = known_slower(made.plan, made.backend_config.name, floats, kept)
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


def known_slower(plan: Plan, backend: str, floats: fx.GraphModule, kept: Kept) -> dict[int, Reason]:
    """The reasons of quantized matches that ``KNOWN`` says are slower, by position."""
    entries = KNOWN.get(backend, ())
    if not entries:
        return {}
    index, values = GraphIndex(floats), GraphValues(None)
    conditions = [condition_from(entry.where) for entry in entries]
    found = {}
    for position, match in enumerate(plan.matches):
        decision = plan.decisions[match.anchor]
        if match.kind is not MatchKind.PATTERN or not decision.quantized or kept.holds(decision):
            continue
        for name in match.nodes:
            node = index.nodes.get(name)
            operator = None if node is None else _operator(index, node)
            for place, (entry, condition) in enumerate(zip(entries, conditions, strict=True)):
                if node is None or operator is None or operator.name not in entry.operators:
                    continue
                if not unmet(condition, UseFacts(index, values, node, node)):
                    found[position] = _reason(match.anchor, backend, place, entry)
    return found


def _operator(index: GraphIndex, node: fx.Node) -> Operator | None:
    module = index.module_of(node)
    return find(node.target) if module is None else find_root(type(module))


def _reason(node: str, backend: str, place: int, entry: KnownSlower) -> Reason:
    return Reason(
        node,
        ReasonCode.SLOWER_THAN_FLOAT,
        f"integers: {entry.integer:.1f} µs ({entry.measured})",
        f"float: {entry.floating:.1f} µs",
        fix='quantize(..., slower="keep") keeps it on integers',
        place=f"known of {backend}, entry {place}: not measured here",
    )
