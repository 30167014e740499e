"""Fusing no more than what can be quantized as asked.

A fusion hides its parts. Where the fused operator is refused and its root alone would be admitted (a
linear layer that an engine runs dynamically, without the ReLU behind it), the fusion is given up.
*Different:* PyTorch fuses first and then leaves the fused operator in float.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch.nn.utils.parametrize import type_before_parametrizations

from backquant.backend_config import BackendConfig
from backquant.fuse.apply import Fused, apply_fusion
from backquant.graph import Captured, OperatorKey
from backquant.graph.shapes import GraphValues
from backquant.match import (
    CustomMatching,
    Decision,
    DefaultRules,
    Fusion,
    Outcome,
    Plan,
    make_plan,
    plan_fusion,
)
from backquant.match.matcher import PatternIndex
from backquant.match.verdict import QConfigRequest, Roles, judge
from backquant.qconfig import QConfigMapping

_ALL = Roles(activation=True, weight=True, bias=True)


class FusedPlan(NamedTuple):
    """A fused graph and the decision about each of its nodes."""

    fused: Fused
    plan: Plan


def plan_fused(
    captured: Captured,
    backend_config: BackendConfig,
    qconfig_mapping: QConfigMapping,
    custom: CustomMatching | None = None,
    values: GraphValues | None = None,
    by_default: DefaultRules | None = None,
) -> FusedPlan:
    """Fuse a captured model for inference, and decide what each operator becomes.

    ``values``: shapes of the captured graph, for the conditions of the backend. ``by_default``: what stays
    float where the mapping names no place.

    Raises ConfigError as ``plan_fusion``, ``apply_fusion`` and ``make_plan`` do.

    >>> import torch
    >>> from torch import nn
    >>> from backquant.backend_config import BackendPatternConfig, DTypeConfig
    >>> from backquant.graph import capture
    >>> from backquant.qconfig import default_dynamic_qconfig
    >>> dynamic = DTypeConfig(torch.quint8, torch.float, torch.qint8, torch.float, is_dynamic=True)
    >>> linear = BackendPatternConfig(nn.Linear).add_dtype_config(dynamic)
    >>> fused = BackendPatternConfig((nn.Linear, nn.ReLU)).set_fuser_method(
    ...     lambda is_qat, linear, relu: nn.Sequential(linear, relu))
    >>> found = plan_fused(
    ...     capture(nn.Sequential(nn.Linear(2, 2), nn.ReLU())),
    ...     BackendConfig("b").set_backend_pattern_configs([linear, fused]),
    ...     QConfigMapping().set_global(default_dynamic_qconfig))
    >>> [(d.operator, d.outcome.value) for d in found.plan.decisions.values()]
    [('Linear', 'quantized'), ('ReLU', 'float')]
    """
    values, custom = values or GraphValues(None), custom or CustomMatching()

    def attempt(declined: frozenset[tuple[str, int]] = frozenset()) -> FusedPlan:
        module, scopes = captured.module, captured.scopes
        fusions = plan_fusion(module, backend_config, declined=declined, values=values)
        fused = apply_fusion(module, scopes, fusions, backend_config, is_qat=False, values=values)
        plan = make_plan(
            fused.module,
            fused.scopes,
            backend_config,
            qconfig_mapping,
            fusions=fusions,
            custom=replace(custom, declined=declined),
            values=values.renamed({fusion.root: fusion.anchor for fusion in fusions}),
            by_default=by_default,
        )
        return FusedPlan(fused, plan)

    first = current = attempt()
    declined: dict[tuple[str, int], str] = {}  # anchor and entry of the fusion: its root
    while hiding := _hiding(current.plan, captured, backend_config):
        declined |= hiding
        current = attempt(frozenset(declined))
    kept = {key for key, root in declined.items() if current.plan.decisions[root].quantized}
    if not kept:
        return first
    chosen = current if len(kept) == len(declined) else attempt(frozenset(kept))
    notes = (
        _note(fusion, first.plan.decisions[fusion.root])
        for fusion in first.plan.fusions
        if (fusion.anchor, fusion.entry) in kept
    )
    return FusedPlan(chosen.fused, chosen.plan.noted(*notes))


def _note(fusion: Fusion, as_one: Decision) -> str:
    why = "; ".join(f"requested {each.asked}, supported {each.admitted}" for each in as_one.reasons)
    return (
        f'"{fusion.pattern}" at {fusion.root!r} is not fused: its first part alone is admitted, and '
        f"as one operator, {as_one.operator}, it is refused" + (f" ({why})" if why else "")
    )


def _hiding(plan: Plan, captured: Captured, backend: BackendConfig) -> dict[tuple[str, int], str]:
    """The fusions that were refused and whose root alone is admitted."""
    found: dict[tuple[str, int], str] = {}
    targets: dict[str, str] = {}
    for fusion in plan.fusions:
        decision = plan.decisions[fusion.root]
        if decision.outcome is not Outcome.FLOAT or decision.asked_activation is None:
            continue
        if not targets:
            targets = {node.name: str(node.target) for node in captured.module.graph.nodes}
        root = captured.module.get_submodule(targets[fusion.root])
        key = OperatorKey("module", type_before_parametrizations(root))
        requests = QConfigRequest(
            decision.asked_activation, decision.asked_weight, decision.asked_output
        )
        single = (c for c in PatternIndex.of(backend).candidates(key) if c.pattern.size == 1)
        if any(judge(one.config, requests, _ALL).dtype_config is not None for one in single):
            found[fusion.anchor, fusion.entry] = fusion.root
    return found
