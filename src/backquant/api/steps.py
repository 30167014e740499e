"""The first half of every flow: capture, plan the fusions, fuse, plan the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import fx, nn

from backquant.api.arguments import given_model
from backquant.api.beside_float import rules_beside_float
from backquant.api.capturing import Capturing, captured_with, spelled_for, with_reasons
from backquant.api.left_float import rules_for_left
from backquant.backend_config import BackendConfig
from backquant.fuse import Fused, apply_fusion, attention_apart, plan_fused, without_sync
from backquant.graph import released, shallow_copy, without_collector
from backquant.match import CustomMatching, Fusion, Plan, make_plan, plan_fusion
from backquant.qconfig import PrepareCustomConfig, QConfigMapping

__all__ = [
    "FusedGraph",
    "Planned",
    "captured_with",
    "decided",
    "evaluation_copy",
    "fused_graph",
    "planned",
]

# what a backend chooses for a graph when nobody passes a mapping, one after the other
_DEFAULT_RULES = (rules_for_left, rules_beside_float)


@dataclass(frozen=True)
class Planned:
    """A fused graph with the decision about each of its operators; nothing is observed yet.

    ``backend`` and ``mapping``: those that were asked for, in the spelling of the graph.
    """

    fused: Fused
    plan: Plan
    backend: BackendConfig
    mapping: QConfigMapping

    @property
    def module(self) -> fx.GraphModule:
        return self.fused.module


class FusedGraph(NamedTuple):
    """A captured graph with fused modules, and what was fused."""

    fused: Fused
    fusions: tuple[Fusion, ...]


@without_collector
def fused_graph(
    model: nn.Module, backend: BackendConfig, custom: PrepareCustomConfig | None = None
) -> FusedGraph:
    """Capture ``model`` and fuse what the backend fuses for inference. The model is not changed."""
    captured = captured_with(custom, model)
    without_sync(captured.module)
    fusions = plan_fusion(captured.module, backend)
    fused = apply_fusion(captured.module, captured.scopes, fusions, backend, is_qat=False)
    return FusedGraph(fused, fusions)


@without_collector
def planned(  # size: what is asked for of a model, and how to capture it
    model: nn.Module,
    backend: BackendConfig,
    mapping: QConfigMapping,
    custom: PrepareCustomConfig | None = None,
    capturing: Capturing | None = None,
) -> Planned:
    """The fused graph of ``model`` and the plan for it; see ``plan_fused`` for what is not fused.

    ``capturing.leave_float``: what the backend leaves in float by default is left there.
    """
    captured = captured_with(custom, model, capturing)
    without_sync(captured.module)
    backend, mapping = spelled_for(captured, backend, mapping)
    matching = CustomMatching.of(custom)
    attention_apart(captured, backend, mapping)
    fused, plan = plan_fused(captured, backend, mapping, matching)
    notes: tuple[str, ...] = ()
    for rules in _DEFAULT_RULES if capturing is not None and capturing.leave_float else ():
        chosen = rules(fused, plan, backend, mapping)
        if chosen is not None:
            mapping, notes = chosen.mapping, (*notes, *chosen.notes)
            fused, plan = plan_fused(captured, backend, mapping, matching)
    plan = with_reasons(replace(plan, notes=(*plan.notes, *notes)), captured)
    released(captured.module)
    return Planned(fused, plan, backend, mapping)


def decided(
    graph: FusedGraph,
    backend: BackendConfig,
    mapping: QConfigMapping,
    custom: PrepareCustomConfig | None = None,
) -> Planned:
    """A fused graph with the plan for it."""
    chosen = make_plan(
        graph.fused.module,
        graph.fused.scopes,
        backend,
        mapping,
        fusions=graph.fusions,
        custom=CustomMatching.of(custom),
    )
    return Planned(graph.fused, chosen, backend, mapping)


def evaluation_copy(model: Any) -> nn.Module:
    """A copy in evaluation mode that shares the tensors; the model keeps its training flags.

    >>> model = nn.Dropout()
    >>> evaluation_copy(model).training, model.training
    (False, True)
    """
    return shallow_copy(given_model(model)).eval()
