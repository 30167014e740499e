"""What a plan refuses, and why: before calibration, and once scales are known."""

from __future__ import annotations

from torch import fx

from backquant.convert import convert_to_reference, reference_state
from backquant.match import Plan, Reason
from backquant.match.plan import Decision
from backquant.match.plan import Outcome as PlanOutcome
from backquant.prepare import prepared_state
from backquant.reason_codes import ReasonCode


def refused_after_calibration(prepared: fx.GraphModule) -> Reason | None:
    """The reason of a rule of the description on measured scales; ``None`` where the plan holds.

    >>> import torch
    >>> from backquant.api import prepare_fx
    >>> from backquant.qconfig import get_default_qconfig_mapping
    >>> mapping = get_default_qconfig_mapping("qnnpack")
    >>> layer, example = torch.nn.Linear(4, 4), (torch.rand(2, 4),)
    >>> _ = torch.nn.init.constant_(layer.bias, -2.7)
    >>> model = torch.nn.Sequential(layer, torch.nn.ReLU())
    >>> prepared = prepare_fx(model, mapping, example, backend_config="qnnpack")
    >>> _ = prepared(*example)
    >>> print(refused_after_calibration(prepared).rule)
    bias-step
    """
    asked = {(one.node, one.rule) for one in prepared_state(prepared).plan.predicates}
    if not asked:
        return None
    plan = reference_state(convert_to_reference(prepared)).plan
    reasons = (reason for decision in plan.decisions.values() for reason in decision.reasons)
    return next((each for each in reasons if (each.node, each.rule) in asked), None)


def in_float(plan: Plan) -> str | None:
    """Why the plan leaves the operator in float; ``None`` where it does not."""
    decisions = [plan.decisions[match.anchor] for match in plan.matches]
    told = [reason_text(each) for each in decisions if not each.quantized]
    if told:
        return told[0]
    return None if decisions else "no entry of the description matches the operator"


def by_condition(plan: Plan) -> bool:
    """Whether the plan refuses a use for a condition of the entry."""
    decisions = [plan.decisions[match.anchor] for match in plan.matches]
    return any(r.rule == ReasonCode.CONDITION for each in decisions for r in each.reasons)


def no_tensor(decision: Decision) -> bool:
    """Whether an operator has no tensor to quantize."""
    return decision.outcome is PlanOutcome.NOT_TENSOR


def reason_text(decision: Decision) -> str:
    """Why an operator stays float."""
    if not decision.reasons:
        return f"{decision.operator} stays float, for no reason"
    last = decision.reasons[-1]
    return (
        f"{decision.operator} stays float: {last.rule}: {last.asked}; admitted is {last.admitted}"
    )
