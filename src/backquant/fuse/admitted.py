"""Fusing no more than what can be quantized as asked.

A fusion hides its parts. Where the fused operator is refused and its root alone would be admitted (a
linear layer that an engine runs dynamically, without the ReLU behind it), the fusion is given up.
*Different:* PyTorch fuses first and then leaves the fused operator in float.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import nn
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
    attempts = _Attempts(captured, backend_config, qconfig_mapping, custom, values, by_default)
    first = current = attempts.make(frozenset())
    declined: dict[tuple[str, int], str] = {}  # anchor and entry of the fusion: its root
    while hiding := attempts.hiding(current):
        declined |= hiding
        current = attempts.make(frozenset(declined))
    kept = {key for key, root in declined.items() if current.plan.decisions[root].quantized}
    if not kept:
        return first
    chosen = current if len(kept) == len(declined) else attempts.make(frozenset(kept))
    notes = (
        _note(fusion, first.plan.decisions[fusion.root])
        for fusion in first.plan.fusions
        if (fusion.anchor, fusion.entry) in kept
    )
    plan = replace(chosen.plan, notes=(*chosen.plan.notes, *notes))
    return FusedPlan(chosen.fused, plan)


def _note(fusion: Fusion, as_one: Decision) -> str:
    why = "; ".join(f"requested {each.asked}, supported {each.admitted}" for each in as_one.reasons)
    return (
        f'"{fusion.pattern}" at {fusion.root!r} is not fused: its first part alone is admitted, and '
        f"as one operator, {as_one.operator}, it is refused" + (f" ({why})" if why else "")
    )


class _Attempts:
    """Plans with some fusions declined."""

    def __init__(
        self,
        captured: Captured,
        backend: BackendConfig,
        mapping: QConfigMapping,
        custom: CustomMatching | None,
        values: GraphValues | None,
        by_default: DefaultRules | None,
    ) -> None:
        self._captured = captured
        self._values = values or GraphValues(None)
        self._backend = backend
        self._mapping = mapping
        self._custom = custom or CustomMatching()
        self._by_default = by_default
        self._nodes: dict[str, str] | None = None

    def make(self, declined: frozenset[tuple[str, int]]) -> FusedPlan:
        """The plan without the declined fusions."""
        module, scopes = self._captured.module, self._captured.scopes
        fusions = plan_fusion(module, self._backend, declined=declined, values=self._values)
        fused = apply_fusion(
            module, scopes, fusions, self._backend, is_qat=False, values=self._values
        )
        decided = make_plan(
            fused.module,
            fused.scopes,
            self._backend,
            self._mapping,
            fusions=fusions,
            custom=replace(self._custom, declined=declined),
            values=self._values.renamed({fusion.root: fusion.anchor for fusion in fusions}),
            by_default=self._by_default,
        )
        return FusedPlan(fused, decided)

    def hiding(self, attempt: FusedPlan) -> dict[tuple[str, int], str]:
        """The fusions that were refused and whose root alone is admitted."""
        return {
            (fusion.anchor, fusion.entry): fusion.root
            for fusion in attempt.plan.fusions
            if self._hides(fusion, attempt.plan.decisions[fusion.root])
        }

    def _hides(self, fusion: Fusion, decision: Decision) -> bool:
        if decision.outcome is not Outcome.FLOAT or decision.asked_activation is None:
            return False
        root = type_before_parametrizations(self._module_of(fusion.root))
        requests = QConfigRequest(
            decision.asked_activation, decision.asked_weight, decision.asked_output
        )
        single = (
            candidate.config
            for candidate in PatternIndex.of(self._backend).candidates(OperatorKey("module", root))
            if candidate.pattern.size == 1
        )
        return any(judge(config, requests, _ALL).dtype_config is not None for config in single)

    def _module_of(self, node: str) -> nn.Module:
        if self._nodes is None:
            graph = self._captured.module.graph
            self._nodes = {node.name: str(node.target) for node in graph.nodes}
        return self._captured.module.get_submodule(self._nodes[node])
