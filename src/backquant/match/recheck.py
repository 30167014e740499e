"""Checks of the plan after calibration: constraints on measured scales, and outputs that stay float.

PyTorch quantizes the output of every quantized operator. Where only a float operator reads it (a residual
addition, attention), that costs accuracy and a conversion, and saves nothing if the kernel can also return
floats. A backend names such operators by rules (``LeaveFloat``, ``results``), which are applied to the final
plan."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from backquant.backend_config import BackendConfig, LeaveFloat
from backquant.backend_config.checks import short_text
from backquant.graph import GraphIndex, OperatorKey
from backquant.match.float_places import calls_one_of, keys_of
from backquant.match.matcher import key_of
from backquant.match.plan import Plan, Predicate, Reason
from backquant.match.scale_rules import is_power_of_two
from backquant.operators.index import find
from backquant.reason_codes import ReasonCode

# Scales are float32, so bounds are compared with a relative tolerance.
_SLACK = 1 + 2**-20


@dataclass(frozen=True)
class MeasuredScales:
    """The scales of the tensors that play one role at one match.

    ``node`` is the anchor of the match; ``role`` is ``"input"``, ``"output"`` or ``"weight"``;
    ``scales`` holds one number per tensor or per channel; ``ranges`` the smallest and the largest value
    that was measured, in steps of the scale, for each.
    """

    node: str
    role: str
    scales: tuple[float, ...]
    ranges: tuple[tuple[float, float], ...] = ()


def recheck(plan: Plan, measured: Iterable[MeasuredScales]) -> Plan:
    """The plan with those matches in float whose measured scales violate a constraint of the backend.

    Tensors that were not measured are not checked.

    >>> recheck(Plan("x86"), [MeasuredScales("conv", "output", (0.1,))]) == Plan("x86")
    True
    """
    by_role = {(item.node, item.role): item for item in measured}
    known = ((p, by_role.get((p.node, p.role))) for p in plan.predicates)
    found = (_broken(p, item) for p, item in known if item is not None)
    return plan.refuse(reason for reason in found if reason is not None)


def _broken(predicate: Predicate, found: MeasuredScales) -> Reason | None:
    bound = predicate.bound
    if predicate.rule == ReasonCode.ZERO_POINT:
        asked = _wrong_side(found, bound or 0.0)
    elif predicate.rule == ReasonCode.REQUANTIZATION_RATIO:
        asked = _wrong_ratio(found, bound)
    elif predicate.rule == ReasonCode.BIAS_STEP:
        asked = _coarse_bias(found, bound or 0.0)
    elif predicate.rule in (ReasonCode.SCALE_MAX, ReasonCode.SCALE_SET):
        asked = _largest(s for s in found.scales if bound is not None and s > bound * _SLACK)
    else:
        asked = _largest(scale for scale in found.scales if not is_power_of_two(scale))
    if not asked:
        return None
    return Reason(
        node=predicate.node,
        rule=predicate.rule,
        asked=f"{_named(predicate, asked)}, as measured",
        admitted=_named(predicate, predicate.admitted),
        place=predicate.place,
    )


def _named(predicate: Predicate, text: str) -> str:
    return text if predicate.role in ("ratio", "bias step") else f"{predicate.role} {text}"


def _wrong_ratio(found: MeasuredScales, bound: float | None) -> str:
    if bound is None:
        wrong = [r for r in found.scales if abs(math.remainder(math.log2(r), 1.0)) > _SLACK - 1]
    elif bound < 0:
        wrong = [ratio for ratio in found.scales if ratio * _SLACK < -bound]
    else:
        wrong = [ratio for ratio in found.scales if ratio > bound * _SLACK]
    return f"input × weight / output scale {short_text(wrong[0])}" if wrong else ""


def _coarse_bias(found: MeasuredScales, bound: float) -> str:
    largest = max(found.scales)
    of_which = f"a bias beside input × weight / output scale {short_text(largest)}"
    return of_which if largest > bound else ""


def _largest(wrong: Iterable[float]) -> str:
    largest = max(wrong, default=None)
    return "" if largest is None else f"scale {short_text(largest)}"


def _wrong_side(found: MeasuredScales, sign: float) -> str:
    """Measured values that the zero point leaves no integers for (below it, say), by more than half a
    step."""
    for (low, high), scale in zip(
        found.ranges, found.scales, strict=False
    ):  # shorter for weights, which have no ranges
        if (-low if sign > 0 else high) > 0.5:
            return f"values from {low * scale:.3g} to {high * scale:.3g}"
    return ""


def float_results(
    plan: Plan, graph: GraphIndex, backend: BackendConfig, rules: Iterable[LeaveFloat]
) -> frozenset[str]:
    """Anchors of the matches whose outputs ``rules`` leave in float, if no quantized operator reads them."""
    keys = keys_of(operator for rule in rules if rule.results for operator in rule.operators)
    if not keys:
        return frozenset()
    return frozenset(
        match.anchor
        for match in plan.matches
        if match.entry >= 0
        and (
            key_of(backend.shared_configs[match.entry].normal_pattern.nodes[0]) in keys
            or _is_fused(graph, graph.nodes[match.nodes[0]], keys)
        )
    )


def _is_fused(graph: GraphIndex, node: fx.Node, keys: set[OperatorKey | None]) -> bool:
    """Whether a module is a fused or QAT form of one; not if a second activation enters it."""
    return len(node.args) + len(node.kwargs) == 1 and calls_one_of(graph, node, keys)


def only_moves(graph: GraphIndex, node: fx.Node) -> bool:
    """Whether a node only moves the values of its one input.

    >>> gm = fx.symbolic_trace(lambda x: x.view(-1))
    >>> only_moves(GraphIndex(gm), list(gm.graph.nodes)[1])
    True
    """
    key = graph.key(node)
    known = None if key is None else find(key.op)
    one = len(node.all_input_nodes) == 1 or node.op == "call_method"
    return known is not None and known.family == "shape" and known.shares_qparams and one
