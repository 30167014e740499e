"""The first half of every flow: capture, plan the fusions, fuse, plan the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch import fx, nn

from backquant.api.arguments import given_model
from backquant.api.beside_float import rules_beside_float
from backquant.api.capturing import (
    Capturing,
    captured_with,
    exported_instead_of,
    is_exported,
    spelled_for,
    with_reasons,
)
from backquant.api.choosing import described, kept_whole, on_integers, worth_an_export
from backquant.api.costs import costs_of
from backquant.api.left_float import LeftRules, rules_for_left
from backquant.backend_config import BackendConfig
from backquant.fuse import Fused, apply_fusion, attention_apart, plan_fused, without_sync
from backquant.graph import Captured, released, shallow_copy
from backquant.graph.values import GraphValues, TensorFacts
from backquant.match import (
    CustomMatching,
    DefaultRules,
    Fusion,
    Plan,
    Reason,
    make_plan,
    plan_fusion,
)
from backquant.operators.equivalents import mapping_for_export
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

Rules = Callable[[Fused, Plan, BackendConfig, QConfigMapping], LeftRules | None]


@dataclass(frozen=True)
class Planned:
    """A fused graph with the decision about each of its operators; nothing is observed yet.

    ``backend`` and ``mapping``: those that were asked for, in the spelling of the graph. ``shapes``: of its
    values, as far as conditions of the backend asked for them.
    """

    fused: Fused
    plan: Plan
    backend: BackendConfig
    mapping: QConfigMapping
    shapes: Mapping[str, TensorFacts] = field(default_factory=dict)

    @property
    def module(self) -> fx.GraphModule:
        return self.fused.module


class FusedGraph(NamedTuple):
    """A captured graph with fused modules, and what was fused."""

    fused: Fused
    fusions: tuple[Fusion, ...]


def fused_graph(
    model: nn.Module, backend: BackendConfig, custom: PrepareCustomConfig | None = None
) -> FusedGraph:
    """Capture ``model`` and fuse what the backend fuses for inference. The model is not changed."""
    captured = captured_with(custom, model)
    without_sync(captured.module)
    fusions = plan_fusion(captured.module, backend)
    fused = apply_fusion(captured.module, captured.scopes, fusions, backend, is_qat=False)
    return FusedGraph(fused, fusions)


def planned(  # size: what is asked for of a model, and how to capture it
    model: nn.Module,
    backend: BackendConfig,
    mapping: QConfigMapping,
    custom: PrepareCustomConfig | None = None,
    capturing: Capturing | None = None,
    more_rules: tuple[Rules, ...] = (),
) -> Planned:
    """The fused graph of ``model`` and the plan for it; see ``plan_fused`` for what is not fused.

    ``capturing.own``: what the backend leaves in float by default is left there (``DefaultRules``), and
    ``more_rules`` choose, too, where nobody passed a mapping.
    ``capturing.decompose``: where a trace works and keeps whole what holds multiply-adds, the model is
    exported, too, and the plan that puts more of them on integers is taken.
    """
    if capturing is not None and capturing.decompose:
        capturing = replace(
            capturing,
            whole_classes=_named_by(backend, "module"),
            whole_functions=_named_by(backend, "function"),
            named=_asked_by_type(mapping, capturing),
        )
    captured = captured_with(custom, model, capturing)
    asked = _Planning(backend, mapping, CustomMatching.of(custom), capturing, more_rules)
    made = asked.plan(captured)
    if capturing is None or capturing.how != "auto" or not capturing.decompose:
        return made
    return made if is_exported(captured) else _better(made, model, custom, asked)


def _named_by(backend: BackendConfig, kind: str) -> frozenset[Any]:
    """The classes of modules, or the functions, that entries of a backend name: none is taken apart."""
    nodes = (node for pattern in backend.entries for node in pattern.nodes)
    return frozenset(node.op for node in nodes if node.kind == kind)


def _asked_by_type(mapping: QConfigMapping, capturing: Capturing) -> frozenset[Any]:
    """The operators that a request names which somebody passed."""
    if any(mapping is own for own in capturing.own or ()):
        return frozenset()
    by_place = (key[1] for key in mapping.module_name_object_type_order_qconfigs)
    return frozenset((*mapping.object_type_qconfigs, *by_place))


@dataclass(frozen=True)
class _Planning:
    """What a captured model is planned for."""

    backend: BackendConfig
    mapping: QConfigMapping
    custom: CustomMatching
    capturing: Capturing | None
    more_rules: tuple[Rules, ...]

    def plan(self, captured: Captured) -> Planned:
        without_sync(captured.module)
        backend, mapping = spelled_for(captured, self.backend, self.mapping)
        attention_apart(captured, backend, mapping)
        values, by_default = self._values(captured), self._by_default(captured, backend, mapping)
        fused, plan = plan_fused(captured, backend, mapping, self.custom, values, by_default)
        notes: tuple[str, ...] = ()
        reasons: dict[str, Reason] = {}
        for rules in self._rules(by_default):
            chosen = rules(fused, plan, backend, mapping)
            if chosen is not None:
                mapping, notes = chosen.mapping, (*notes, *chosen.notes)
                reasons |= chosen.reasons
                fused, plan = plan_fused(
                    captured, backend, mapping, self.custom, values, by_default
                )
        plan = with_reasons(plan.explain(reasons).noted(*notes), captured)
        released(captured.module)
        values = values.renamed({fusion.root: fusion.anchor for fusion in plan.fusions})
        return Planned(fused, plan, backend, mapping, values.seen())

    def _values(self, captured: Captured) -> GraphValues:
        """Shapes of the captured graph, measured when a condition asks for them."""
        if self.capturing is None:
            return GraphValues(None)
        return GraphValues(captured.module, self.capturing.example_inputs, captured.free)

    def _own(self) -> tuple[QConfigMapping, ...]:
        return () if self.capturing is None else self.capturing.own or ()

    def _by_default(
        self, captured: Captured, backend: BackendConfig, mapping: QConfigMapping
    ) -> DefaultRules | None:
        own = self._own()
        if not own or backend.defaults is None:
            return None
        if is_exported(captured):
            own = tuple(map(mapping_for_export, own))
        return DefaultRules.of(backend.defaults.leave_float, mapping, own)

    def _rules(self, by_default: DefaultRules | None) -> Iterator[Rules]:
        """What chooses further rules for a graph, one after the other."""
        if by_default is not None:
            yield partial(rules_for_left, by_default)
        if any(self.mapping is own for own in self._own()):
            yield from (rules_beside_float, *self.more_rules)


def _better(
    made: Planned,
    model: nn.Module,
    custom: PrepareCustomConfig | None,
    asked: _Planning,
) -> Planned:
    """``made`` of a trace, or the plan of an export where that puts more on integers."""
    kept = kept_whole(made.module, made.plan, asked.custom)
    if not kept or asked.capturing is None:
        return made
    example = asked.capturing.example_inputs
    costs = costs_of(made.module, example).multiply_adds
    if not worth_an_export(costs, kept):
        return made
    largest = described(made.module, max(kept, key=lambda node: costs.get(node.name, 0)))
    found = exported_instead_of(custom, model, asked.capturing)
    if isinstance(found, str):
        note = f"{largest} stays float as a whole: it cannot be exported ({found})"
        return replace(made, plan=made.plan.noted(note))
    other = asked.plan(found)
    before = on_integers(made.plan, costs)
    after = on_integers(other.plan, costs_of(other.module, example).multiply_adds)
    if after <= before:
        return made
    note = f"captured by torch.export; a symbolic trace keeps {largest} whole, in float"
    plan = replace(other.plan, notes=(note, *other.plan.notes[1:]))
    return replace(other, plan=plan)


def decided(
    graph: FusedGraph,
    backend: BackendConfig,
    mapping: QConfigMapping,
    custom: PrepareCustomConfig | None = None,
    example_inputs: Any = None,
) -> Planned:
    """A fused graph with the plan for it; ``example_inputs``: for conditions of the backend on shapes."""
    values = GraphValues(graph.fused.module, example_inputs)
    chosen = make_plan(
        graph.fused.module,
        graph.fused.scopes,
        backend,
        mapping,
        fusions=graph.fusions,
        custom=CustomMatching.of(custom),
        values=values,
    )
    return Planned(graph.fused, chosen, backend, mapping, values.seen())


def evaluation_copy(model: Any) -> nn.Module:
    """A copy in evaluation mode that shares the tensors; the model keeps its training flags.

    >>> model = nn.Dropout()
    >>> evaluation_copy(model).training, model.training
    (False, True)
    """
    return shallow_copy(given_model(model)).eval()
