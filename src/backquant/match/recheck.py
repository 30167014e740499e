"""The second look: constraints on measured scales, after calibration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from backquant.backend_config.numbers import short_text
from backquant.match.constraints import is_power_of_two
from backquant.match.plan import Decision, Outcome, Plan, Predicate, Reason
from backquant.reason_codes import ReasonCode

__all__ = ["MeasuredScales", "recheck"]


@dataclass(frozen=True)
class MeasuredScales:
    """The scales of the tensors that play one role at one match.

    ``node`` is the anchor of the match; ``role`` is ``"input"``, ``"output"`` or ``"weight"``;
    ``scales`` holds one number per tensor or per channel.
    """

    node: str
    role: str
    scales: tuple[float, ...]


def recheck(plan: Plan, measured: Iterable[MeasuredScales]) -> Plan:
    """The plan in which matches whose measured scales the backend does not take stay float.

    Roles that were not measured are not checked.

    >>> recheck(Plan("x86"), [MeasuredScales("conv", "output", (0.1,))]) == Plan("x86")
    True
    """
    scales = {(item.node, item.role): item.scales for item in measured}
    reasons: dict[str, list[Reason]] = {}
    for predicate in plan.predicates:
        found = _broken(predicate, scales.get((predicate.node, predicate.role), ()))
        if found is not None:
            reasons.setdefault(predicate.node, []).append(found)
    if not reasons:
        return plan
    decisions = dict(plan.decisions)
    for match in plan.matches:
        for name in match.nodes if match.anchor in reasons else ():
            decisions[name] = _refused(decisions[name], reasons[match.anchor])
    return replace(plan, decisions=decisions)


def _refused(decision: Decision, reasons: list[Reason]) -> Decision:
    own = tuple(replace(reason, node=decision.node) for reason in reasons)
    return replace(
        decision,
        outcome=Outcome.FLOAT,
        dtype_config=None,
        reasons=(*decision.reasons, *own),
    )


def _broken(predicate: Predicate, scales: tuple[float, ...]) -> Reason | None:
    if predicate.rule == ReasonCode.SCALE_MAX:
        bound = predicate.bound
        wrong = [scale for scale in scales if bound is not None and scale > bound]
    else:
        wrong = [scale for scale in scales if not is_power_of_two(scale)]
    if not wrong:
        return None
    return Reason(
        node=predicate.node,
        rule=predicate.rule,
        asked=f"{predicate.role} scale {short_text(max(wrong))}, as measured",
        admitted=f"{predicate.role} {predicate.admitted}",
        place=predicate.place,
    )
