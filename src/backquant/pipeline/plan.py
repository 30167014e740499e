"""The first half of every flow: capture, plan the fusions, fuse, plan the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized

from backquant.backend_config import BackendConfig
from backquant.errors import CaptureError
from backquant.fuse import (
    apply_fusion,
    decompose_attention,
    plan_fused,
    scaled_by_sample,
    separate_recurrent_layers,
    without_sync,
)
from backquant.fuse.admitted import FusedPlan
from backquant.fuse.contracts import Fused
from backquant.graph import Captured, Scope, released, shallow_copy, without_parametrizations
from backquant.graph.hooks import weight_hooks
from backquant.graph.interception import Draws
from backquant.graph.shapes import GraphValues
from backquant.match import (
    CustomMatching,
    DefaultRules,
    Fusion,
    Plan,
    Reason,
    make_plan,
    plan_fusion,
)
from backquant.match.default_between import rules_between_floats
from backquant.match.default_places import ChosenRules, rules_for_places
from backquant.match.default_rules import is_like_default
from backquant.match.plan import BySample
from backquant.operators.equivalents import mapping_for_export
from backquant.pipeline.by_sample import rules_before_scaling, scaled_note
from backquant.pipeline.capture import (
    Capturing,
    captured_with,
    exported,
    exported_instead,
    first_sentence,
    is_exported,
    spelled_for,
    with_reasons,
)
from backquant.pipeline.choose_capture import described, kept_whole, on_integers, worth_an_export
from backquant.pipeline.costs import costs_of, left_out
from backquant.pipeline.faithful import require_same
from backquant.prepare import Record, Request
from backquant.qconfig import QConfigMapping

#: From the places that the request names, a graph, its scopes, the plan for it, and what is asked of which
#: backend, to further rules.
Rules = Callable[
    [DefaultRules, fx.GraphModule, Mapping[str, Scope], Plan, BackendConfig, QConfigMapping],
    ChosenRules | None,
]

#: From a graph, the plan for it and a backend to the layers whose inputs are scaled sample by sample.
ChooseBySample = Callable[[fx.GraphModule, Plan, BackendConfig], dict[str, BySample]]


class Planned(NamedTuple):
    """A fused graph and its record, with the decision about each operator; nothing is observed yet."""

    module: fx.GraphModule
    record: Record

    def noted(self, *notes: str) -> Planned:
        """The same with notes in the plan."""
        return self._replace(record=replace(self.record, plan=self.record.plan.noted(*notes)))


class FusedGraph(NamedTuple):
    """A captured graph with fused modules, and what was fused."""

    fused: Fused
    fusions: tuple[Fusion, ...]


def fused_graph(model: nn.Module, backend: BackendConfig) -> FusedGraph:
    """Capture ``model`` and fuse what the backend fuses for inference. The model is not changed."""
    captured = captured_with(None, model)
    without_sync(captured.module)
    fusions = plan_fusion(captured.module, backend)
    fused = apply_fusion(captured.module, captured.scopes, fusions, backend, is_qat=False)
    return FusedGraph(fused, fusions)


def planned(
    model: nn.Module,
    request: Request,
    capturing: Capturing | None = None,
    more_rules: tuple[Rules, ...] = (),
    by_sample: ChooseBySample | None = None,
) -> Planned:
    """The fused graph of ``model`` and the plan for it; see ``plan_fused`` for what is not fused.

    ``capturing.own``: what the backend leaves in float by default is left there (``DefaultRules``), and
    ``more_rules`` and ``by_sample`` choose, too, for what no rule of a mapping that somebody passed names,
    where it asks for the rest as the backend does.
    ``capturing.decompose``: the graph is run on the example inputs, once, for its costs. Where a trace works
    and keeps whole what holds multiply-adds, the model is exported, too, and the plan that puts more of
    them on integers is taken.

    Raises ``CaptureError`` as ``captured_with`` and ``costs_of``.
    """
    if capturing is not None and capturing.decompose:
        capturing = replace(
            capturing,
            whole_classes=named_by(request.backend_config, "module"),
            whole_functions=named_by(request.backend_config, "function"),
            named=_requested_by_type(request.qconfig_mapping, capturing),
        )
    custom = CustomMatching.of(request.custom)
    planning = _Planning(request, custom, capturing, more_rules, by_sample)
    captured = captured_with(request.custom, model, capturing)
    made = planning.plan(captured)
    if capturing is None or capturing.example_inputs is None:
        return made
    is_open = capturing.how == "auto" and not is_exported(captured)
    if not capturing.decompose and not (
        is_open and left_out(made.module, capturing.example_inputs)
    ):
        return made
    failure: CaptureError | None = None
    try:
        made = _counted(made, model, capturing, captured)
    except CaptureError as error:
        # a trace takes one way for all values, and decides about arguments that are left out as if given
        if not is_open:
            raise
        failure = error
    if failure is not None:  # behind the handler, as in ``captured_with``
        again = exported_instead(request.custom, model, capturing, failure)
        return _counted(planning.plan(again), model, capturing, again)
    return _better(made, model, planning, capturing) if is_open and capturing.decompose else made


def _counted(made: Planned, model: nn.Module, capturing: Capturing, captured: Captured) -> Planned:
    """With what a run on the example inputs shows. Raises ``CaptureError`` where the graph fails on them, or
    gives other values than ``model``."""
    inputs, origin = capturing.example_inputs, captured.origin
    with Draws() as draws:
        costs, outputs = costs_of(made.module, inputs, origin)
    same = require_same(model, inputs, outputs, draws.found, origin, capturing.called)
    made = made.noted(*same.notes)
    return made._replace(record=replace(made.record, costs=replace(costs, total=same.total)))


def named_by(backend: BackendConfig, kind: str) -> frozenset[Any]:
    """The classes of modules, or the functions, that entries of a backend name: none is taken apart."""

    def named(backend: BackendConfig) -> frozenset[Any]:
        nodes = (node for pattern in backend.shared_entries for node in pattern.nodes)
        return frozenset(node.op for node in nodes if node.kind == kind)

    return backend.derived((named_by, kind), named)


def _requested_by_type(mapping: QConfigMapping, capturing: Capturing) -> frozenset[Any]:
    """The operators that a request names which somebody passed."""
    if any(mapping is own for own in capturing.own or ()):
        return frozenset()
    by_place = (key[1] for key in mapping.module_name_object_type_order_qconfigs)
    return frozenset((*mapping.object_type_qconfigs, *by_place))


class _PlanDraft(NamedTuple):
    """A plan, the shapes that it was decided by, and what has been chosen for it beyond what is asked."""

    fitted: FusedPlan
    values: GraphValues
    mapping: QConfigMapping
    notes: tuple[str, ...] = ()
    reasons: Mapping[str, Reason] = MappingProxyType({})
    separate_layers: tuple[str, ...] = ()

    def chosen_by(
        self, rules: Rules, by_default: DefaultRules, backend: BackendConfig
    ) -> ChosenRules | None:
        fused, plan = self.fitted
        return rules(by_default, fused.module, fused.scopes, plan, backend, self.mapping)

    def with_choice(self, chosen: ChosenRules) -> _PlanDraft:
        return self._replace(
            mapping=chosen.mapping,
            notes=(*self.notes, *chosen.notes),
            reasons={**self.reasons, **chosen.reasons},
        )

    def with_separate(self, paths: tuple[str, ...]) -> _PlanDraft:
        if not paths:
            return self
        note = f"decided layer by layer: {', '.join(paths)}"
        return self._replace(
            separate_layers=(*self.separate_layers, *paths), notes=(*self.notes, note)
        )


@dataclass(frozen=True)
class _Planning:
    """What a captured model is planned for."""

    request: Request
    custom: CustomMatching
    capturing: Capturing | None
    more_rules: tuple[Rules, ...]
    by_sample: ChooseBySample | None

    def plan(self, captured: Captured) -> Planned:
        without_sync(captured.module)
        backend, mapping = spelled_for(captured, self.request)
        decompose_attention(captured, backend, mapping)
        by_default = self._by_default(captured, backend, mapping)
        drawn = self._drawn(captured, backend, mapping, by_default)
        layers = self._by_sample(drawn, backend, by_default)
        if layers:  # what is chosen counts operators, and there are more of them
            paths = scaled_by_sample(captured, layers)
            separated = drawn.separate_layers
            drawn = self._drawn(captured, backend, mapping, by_default, separated, layers)
            drawn = drawn._replace(notes=(*drawn.notes, scaled_note(paths)))
        plan = drawn.fitted.plan.explain(drawn.reasons).noted(*drawn.notes)
        plan = replace(plan, separate_layers=drawn.separate_layers, by_sample=layers)
        plan = with_reasons(plan, captured)
        released(captured.module)
        fused = drawn.fitted.fused
        values = drawn.values.renamed({fusion.root: fusion.anchor for fusion in plan.fusions})
        record = Record(
            plan, backend, drawn.mapping, self.request.custom, fused.scopes, fused.provenance
        )
        return Planned(fused.module, replace(record, shapes=values.seen()))

    def _drawn(
        self,
        captured: Captured,
        backend: BackendConfig,
        mapping: QConfigMapping,
        by_default: DefaultRules | None,
        separated: tuple[str, ...] = (),
        layers: Mapping[str, BySample] = MappingProxyType({}),
    ) -> _PlanDraft:
        """The plan with what is chosen for the graph, which was changed by ``separated`` and ``layers``."""

        def fit(mapping: QConfigMapping, values: GraphValues) -> FusedPlan:
            return plan_fused(captured, backend, mapping, self.custom, values, by_default)

        values = self._values(captured)
        drawn = _PlanDraft(fit(mapping, values), values, mapping).with_separate(separated)
        if by_default is None:
            return drawn
        for rules in self._rules(layers):
            chosen = drawn.chosen_by(rules, by_default, backend)
            if chosen is not None and chosen.separate_layers:
                separate_recurrent_layers(captured, chosen.separate_layers)
                drawn, values = (
                    drawn.with_separate(tuple(chosen.separate_layers)),
                    self._values(captured),
                )
                drawn = drawn._replace(fitted=fit(drawn.mapping, values), values=values)
                chosen = drawn.chosen_by(rules, by_default, backend)
            if chosen is not None:
                drawn = drawn.with_choice(chosen)
                drawn = drawn._replace(fitted=fit(drawn.mapping, values))
        return drawn

    def _by_sample(
        self, drawn: _PlanDraft, backend: BackendConfig, by_default: DefaultRules | None
    ) -> dict[str, BySample]:
        """The layers whose inputs are to be scaled sample by sample."""
        if self.by_sample is None or by_default is None or not self._is_like_default():
            return {}
        fused, plan = drawn.fitted
        found = self.by_sample(fused.module, plan, backend)
        return {
            name: how for name, how in found.items() if not by_default.named(plan.decisions[name])
        }

    def _is_like_default(self) -> bool:
        return is_like_default(self.request.qconfig_mapping, self._own())

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
        if not own:
            return None
        if is_exported(captured):
            own = tuple(map(mapping_for_export, own))
        rules = () if backend.defaults is None else backend.defaults.leave_float
        return DefaultRules.of(rules, mapping, own)

    def _rules(self, layers: Mapping[str, BySample]) -> Iterator[Rules]:
        """What chooses further rules for a graph, one after the other."""
        yield rules_for_places
        if layers:
            yield partial(rules_before_scaling, layers)
        if self._is_like_default():
            yield from (rules_between_floats, *self.more_rules)


def _better(made: Planned, model: nn.Module, planning: _Planning, capturing: Capturing) -> Planned:
    """``made`` of a trace, or the plan of an export where that puts more on integers."""
    plan, counted = made.record.plan, made.record.costs
    kept = kept_whole(made.module, plan, planning.custom)
    costs = {} if counted is None else counted.multiply_adds
    if not kept or not worth_an_export(costs, kept):
        return made
    largest = described(made.module, max(kept, key=lambda node: costs.get(node.name, 0)))
    try:
        captured = exported(planning.request.custom, model, capturing)
        other = _counted(planning.plan(captured), model, capturing, captured)
    except CaptureError as error:
        why = first_sentence(error)
        return made.noted(f"{largest} stays float as a whole: it cannot be exported ({why})")
    after = other.record
    assert after.costs is not None
    if on_integers(after.plan, after.costs.multiply_adds) <= on_integers(plan, costs):
        return made
    note = f"captured by torch.export; a symbolic trace keeps {largest} whole, in float"
    noted = replace(after.plan, notes=(note, *after.plan.notes[1:]))
    return other._replace(record=replace(after, plan=noted))


def decided(
    graph: FusedGraph,
    request: Request,
    example_inputs: Any = None,
    by_default: DefaultRules | None = None,
) -> Planned:
    """A fused graph with the plan for it.

    ``example_inputs`` show shapes and dtypes: fake quantize modules take floats only. ``by_default``: what
    stays float where the mapping names no place.
    """
    fused, backend, mapping = graph.fused, request.backend_config, request.qconfig_mapping
    values = GraphValues(fused.module, example_inputs).run()
    plan = make_plan(
        fused.module,
        fused.scopes,
        backend,
        mapping,
        fusions=graph.fusions,
        custom=CustomMatching.of(request.custom),
        values=values,
        by_default=by_default,
    )
    record = Record(plan, backend, mapping, request.custom, fused.scopes, fused.provenance)
    return Planned(fused.module, replace(record, shapes=values.seen()))


def in_evaluation(model: nn.Module) -> nn.Module:
    """``model`` where it is what ``evaluation_copy`` would hold, else such a copy: to look at, not to change.

    >>> model = nn.Dropout()
    >>> in_evaluation(model) is model, in_evaluation(model.eval()) is model
    (False, True)
    """
    differs = any(
        part.training or is_parametrized(part) or weight_hooks(part) for part in model.modules()
    )
    return evaluation_copy(model) if differs else model


def evaluation_copy(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode that shares the tensors; the model keeps its training flags. Parameters that
    are computed (``torch.nn.utils.parametrize``, old weight norm, pruning) are what they are computed to be.

    >>> model = nn.Dropout()
    >>> evaluation_copy(model).training, model.training
    (False, True)
    >>> evaluation_copy(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    Linear(in_features=2, out_features=2, bias=True)
    """
    return without_parametrizations(shallow_copy(model).eval())
