"""The plan of a graph: every match, every verdict, every reason. Edits nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    ObservationType,
)
from backquant.backend_config.conditions import has_conditions
from backquant.dtypes import is_quantized
from backquant.graph import GraphIndex, Scope
from backquant.graph.shapes import GraphValues, is_wide
from backquant.match.conditions import unmet
from backquant.match.constraints import divides
from backquant.match.default_rules import DefaultRules
from backquant.match.fixes import Suggestions, divided, unused_rules, with_group_size
from backquant.match.float_policy import settle_neighbours
from backquant.match.matcher import PatternIndex
from backquant.match.occurrences import (
    Occurrence,
    find_occurrences,
    valueless_nodes,
    whole_tuples,
)
from backquant.match.plan import (
    Decision,
    Fusion,
    Match,
    MatchKind,
    Outcome,
    Plan,
    Predicate,
    Reason,
)
from backquant.match.reasons import ReasonWriter, Refused
from backquant.match.refusal import Refusal, op_name
from backquant.match.roles import CustomMatching, requested_kind, roles_of
from backquant.match.rules import Hit, QConfigReader, RuleTable, resolve
from backquant.match.scale_rules import WeightSums
from backquant.match.verdict import Judge, QConfigRequest
from backquant.operators.facts import UseFacts
from backquant.qconfig import QConfigMapping
from backquant.reason_codes import ReasonCode


def make_plan(
    module: fx.GraphModule,
    scopes: Mapping[str, Scope],
    backend_config: BackendConfig,
    qconfig_mapping: QConfigMapping,
    *,
    fusions: tuple[Fusion, ...] = (),
    custom: CustomMatching | None = None,
    values: GraphValues | None = None,
    by_default: DefaultRules | None = None,
) -> Plan:
    """Decide for every node of a (fused) graph what it becomes, and say why.

    Args:
        module: the graph.
        scopes: the scope of each node, by name; names of fused-away nodes may be among them.
        backend_config: what the backend can do.
        qconfig_mapping: what is asked for.
        fusions: what was fused before, for rules about the parts of fused modules.
        custom: modules that are no patterns.
        values: shapes, for the conditions of the backend; without them what asks for shapes is refused.
        by_default: what stays float where the mapping names no place.

    Raises:
        ConfigError: a QConfig makes no observer, or a getter of an entry fails.

    >>> import torch
    >>> from torch import nn
    >>> from backquant.backend_config import DTypeConfig
    >>> from backquant.graph import capture
    >>> from backquant.qconfig import default_qconfig
    >>> int8 = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
    >>> entry = BackendPatternConfig(nn.Linear).add_dtype_config(int8)
    >>> captured = capture(nn.Sequential(nn.Linear(2, 2), nn.Softplus()))
    >>> decided = make_plan(
    ...     captured.module, captured.scopes,
    ...     BackendConfig("b").set_backend_pattern_config(entry),
    ...     QConfigMapping().set_global(default_qconfig))
    >>> [(d.operator, d.outcome.value) for d in decided.decisions.values()]
    [('Linear', 'quantized'), ('Softplus', 'float')]
    """
    graph = GraphIndex(module)
    patterns = PatternIndex.of(backend_config)
    table = RuleTable(qconfig_mapping)
    reader, judge = QConfigReader(), Judge()
    facts = _Facts(
        graph=graph,
        scopes=scopes,
        hits=resolve(graph, scopes, table, backend_config, fusions),
        patterns=patterns,
        writer=ReasonWriter(backend_config, graph, patterns, scopes),
        reader=reader,
        judge=judge,
        suggestions=Suggestions(backend_config, reader, judge),
        custom=custom or CustomMatching(),
        values=values or GraphValues(None),
        whole_tuples=whole_tuples(graph),
    )
    declined = facts.custom.declined
    found = find_occurrences(
        graph, patterns, backend_config, facts.special(), declined, facts.values
    )
    facts = replace(facts, valueless=valueless_nodes(graph, found, facts.values))
    decisions, predicates = _decide_all(found, facts)
    decisions = settle_neighbours(graph, backend_config, found, decisions, by_default)
    predicates = [question for question in predicates if decisions[question.node].quantized]
    unused, notes = unused_rules(table, decisions, scopes, fusions)
    notes += (*_uncalled(facts), *_of_another(qconfig_mapping, backend_config))
    matches = tuple(occurrence.match for occurrence in found)
    return Plan(
        backend=backend_config.name,
        fusions=tuple(_with_class(fusion, graph) for fusion in fusions),
        matches=matches,
        decisions=decisions,
        unused_rules=unused,
        notes=notes,
        unreached_entries=_unreached(backend_config, matches, fusions),
        predicates=tuple(predicates),
        no_tensors=tuple(name for name in graph.nodes if name in facts.valueless),
    )


@dataclass(frozen=True)
class _Facts:
    """What is known before anything is decided."""

    graph: GraphIndex
    scopes: Mapping[str, Scope]
    hits: Mapping[str, Hit]
    patterns: PatternIndex
    writer: ReasonWriter
    reader: QConfigReader
    judge: Judge
    suggestions: Suggestions
    custom: CustomMatching
    values: GraphValues
    valueless: frozenset[str] = frozenset()
    whole_tuples: frozenset[str] = frozenset()

    def special(self) -> dict[fx.Node, MatchKind]:
        """The nodes that call standalone or custom modules."""
        requested = {}
        for node in self.graph.calls() if self.custom.custom_modules else ():
            hit = self.hits[node.name]
            if hit.qconfig is not None and self.custom.kinds(self.graph.module_of(node)):
                requests = self.read(hit, node)
                requested[node.name] = requested_kind(requests.activation, requests.weight)
        return self.custom.special(self.graph, requested)

    def has_own_request(self, occurrence: Occurrence) -> bool:
        """Whether this is a standalone module with a QConfigMapping of its own."""
        node = occurrence.anchor
        return occurrence.match.kind is MatchKind.STANDALONE and self.custom.has_own_request(
            str(node.target), self.graph.module_of(node)
        )

    def read(self, hit: Hit, node: fx.Node) -> QConfigRequest:
        where = f"QConfigMapping: {hit.rule}, node {node.name!r}"
        activation = self.reader.activation(hit.qconfig, where)
        weight, output = (
            read(hit.qconfig, where) for read in (self.reader.weight, self.reader.output)
        )
        return QConfigRequest(activation, weight, output)

    def request(self, occurrence: Occurrence) -> str:
        """A QConfig, as code, that would quantize an occurrence for which no rule asks."""
        roles = roles_of(occurrence, self.graph, self.patterns, self.valueless)
        return self.suggestions.request(occurrence.match.entry, roles)

    def unmet(
        self, occurrence: Occurrence, config: BackendPatternConfig, hit: Hit
    ) -> tuple[tuple[Refusal, ...], ...]:
        """For each dtype config of the entry, refusals for those of its conditions that do not hold."""
        requests = self.read(hit, occurrence.anchor)
        asked, given = requests.weight, requests.activation
        shared = None if asked is None else asked.shared_over
        in_blocks = shared is not None and shared.has_blocks
        given_in_blocks = given is not None and given.shared_over.lies_on_rows
        sums = WeightSums(hit.qconfig)
        root, anchor = occurrence.root, occurrence.anchor
        size = None if shared is None else shared.size
        use = UseFacts(self.graph, self.values, root, anchor, occurrence.parts, sums, size)
        other = _other_weights(use.weight_dtype())
        if self.values.may_be_sparse:
            other = (*other, *_sparse_inputs(occurrence, self.values))
        if self.values.may_be_wide:
            other = (*other, *_wide_tensors(occurrence, self.values))
        if root.name in self.whole_tuples or anchor.name in self.whole_tuples:
            other = (*other, _WHOLE_TUPLE)
        if other:
            return (other,) * len(config.dtype_configs)
        states = self.graph.gives_tuple(anchor)
        if not states and not has_conditions(config) and not in_blocks and not given_in_blocks:
            return ()
        in_each_order = [self._unmet_so(each, config, requests) for each in use.orders()]
        found = (
            next((one for one in so if not one), so[0]) for so in zip(*in_each_order, strict=True)
        )
        return tuple(
            (*one, _STATES) if states and _is_static(each) else one
            for one, each in zip(found, config.dtype_configs, strict=True)
        )

    @staticmethod
    def _unmet_so(
        use: UseFacts, config: BackendPatternConfig, requests: QConfigRequest
    ) -> tuple[tuple[Refusal, ...], ...]:
        asked, given = requests.weight, requests.activation
        only = config.dtype_configs[0].where if len(config.dtype_configs) == 1 else None
        common = unmet(config.where, use, beside=only)
        if asked is not None and asked.shared_over.has_blocks:
            common = (*common, *divided(asked, use))
        if given is not None and given.shared_over.lies_on_rows:
            wrong = divides(given, *use.row_shape())
            common = common if wrong is None else (*common, wrong)
        return tuple(
            with_group_size(
                (*common, *unmet(one.where, use, config.where)), asked, use, (config, one)
            )
            for one in config.dtype_configs
        )

    def base(self, node: fx.Node, hit: Hit) -> Decision:
        """The decision "float" without reasons yet: only the fields that follow from the node itself."""
        key = self.graph.key(node)
        scope = self.scopes.get(node.name)
        requests = self.read(hit, node)
        return Decision(
            node=node.name,
            operator=op_name(key.op) if key is not None else node.op,
            module_path=scope.path if scope is not None else "",
            outcome=Outcome.FLOAT,
            rule=hit.rule,
            asked_activation=requests.activation,
            asked_weight=requests.weight,
            asked_output=requests.output,
        )


def _other_weights(dtype: torch.dtype | None) -> tuple[Refusal, ...]:
    """What refuses weights that are not float32."""
    if dtype is None or dtype is torch.float32 or not (dtype.is_floating_point or dtype.is_complex):
        return ()
    name = str(dtype).removeprefix("torch.")
    fix = "" if dtype.is_complex else "model.float()"
    return (Refusal(ReasonCode.DTYPE, f"a weight of {name}", "weights of float32", fix),)


def _sparse_inputs(occurrence: Occurrence, values: GraphValues) -> tuple[Refusal, ...]:
    read = {one.name for node in occurrence.members for one in node.all_input_nodes}
    facts = (values.of(name) for name in sorted(read))
    if not any(known is not None and known.is_sparse for known in facts):
        return ()
    return (Refusal(ReasonCode.CONDITION, "a sparse tensor", "dense tensors", "x.to_dense()"),)


_WHOLE_TUPLE = Refusal(
    ReasonCode.WHOLE_TUPLE,
    "a tuple of tensors as a whole",
    "the tensors, one by one",
    "one, two = …",
)


_STATES = Refusal(
    ReasonCode.WHOLE_TUPLE,
    "one output scale for a result and its states",
    "layers that are quantized at each call",
    "is_dynamic: true and output_dtype: float32 in the description",
)


def _is_static(config: DTypeConfig) -> bool:
    return not config.is_dynamic and is_quantized(config.output_dtype)


def _wide_tensors(occurrence: Occurrence, values: GraphValues) -> tuple[Refusal, ...]:
    """What refuses to read or give numbers that observers and kernels have no integers for."""
    members = occurrence.members
    names = {one.name for node in members for one in (node, *node.all_input_nodes)}
    facts = (values.of(name) for name in sorted(names))
    wide = next((one.dtype for one in facts if one is not None and is_wide(one.dtype)), None)
    if wide is None:
        return ()
    name = str(wide).removeprefix("torch.")
    fix = "" if wide.is_complex else "x.float()"
    return (Refusal(ReasonCode.DTYPE, f"a tensor of {name}", "tensors of float32", fix),)


def _decide_all(
    found: list[Occurrence], facts: _Facts
) -> tuple[dict[str, Decision], list[Predicate]]:
    decisions: dict[str, Decision] = {}
    predicates: list[Predicate] = []
    for number, occurrence in enumerate(found):
        verdict, open_questions = _decide(occurrence, facts)
        verdict = replace(verdict, match=number)
        predicates += open_questions
        for node in occurrence.members:
            decisions[node.name] = _member(verdict, node, facts)
    for node in facts.graph.calls():
        if node.name not in decisions:
            decisions[node.name] = _unmatched(node, facts)
    return {node.name: decisions[node.name] for node in facts.graph.calls()}, predicates


def _decide(occurrence: Occurrence, facts: _Facts) -> tuple[Decision, list[Predicate]]:
    """The verdict of an occurrence, as the decision of its anchor, and what scales must satisfy."""
    anchor, writer = occurrence.anchor, facts.writer
    hit = _rule_of(occurrence, facts)
    observation = occurrence.observation
    base = facts.base(anchor, hit)
    if observation is not None:
        base = replace(base, observation=observation.name)
    if hit.qconfig is None and not facts.has_own_request(occurrence):
        if anchor.name in facts.valueless:
            return replace(base, outcome=Outcome.NOT_TENSOR), []
        request = "" if hit.rule is not None else facts.request(occurrence)
        return replace(base, reasons=(writer.no_qconfig(anchor, hit, request),)), []
    if occurrence.config is None:
        return replace(base, outcome=Outcome.QUANTIZED), []
    if observation is None:
        return replace(base, reasons=(writer.tensor_count(occurrence),)), []
    return _judged(occurrence, occurrence.config, base, hit, facts)


def _judged(
    occurrence: Occurrence,
    config: BackendPatternConfig,
    base: Decision,
    hit: Hit,
    facts: _Facts,
) -> tuple[Decision, list[Predicate]]:
    entry = occurrence.match.entry
    roles = roles_of(occurrence, facts.graph, facts.patterns, facts.valueless)
    roles = replace(roles, unmet=facts.unmet(occurrence, config, hit))
    requests = facts.read(hit, occurrence.anchor)
    if base.observation == ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT.name:
        requests = replace(requests, output=None)
    ruling = facts.judge.rule(entry, config, requests, roles)
    if ruling.dtype_config is not None:
        place = facts.writer.place(entry, ruling.dtype_config)
        admitted = replace(base, outcome=Outcome.QUANTIZED, dtype_config=ruling.dtype_config)
        return admitted, [
            Predicate(base.node, one.role, one.rule, one.bound, one.admitted, place)
            for one in ruling.scales
        ]
    if not roles.output_known or not roles.input_known:
        return replace(base, outcome=Outcome.NOT_TENSOR), []
    reasons = facts.writer.refused(Refused(occurrence, hit, requests, roles, ruling))
    return replace(base, reasons=reasons), []


def _rule_of(occurrence: Occurrence, facts: _Facts) -> Hit:
    """The rule that applies to the match's anchor; a rule that leaves any node of the match in float wins.

    A pattern that is fused for inference but not for training takes the rule of its root, as the fused module
    would.
    """
    config = occurrence.config
    unfused = config is not None and config.fuser_method is not None
    own = facts.hits[(occurrence.root if unfused else occurrence.anchor).name]
    for node in occurrence.members:
        hit = facts.hits[node.name]
        if hit.rule is not None and hit.qconfig is None and own.qconfig is not None:
            return Hit(hit.rule, None, own.use)
    return own


def _member(verdict: Decision, node: fx.Node, facts: _Facts) -> Decision:
    """The verdict of a match as the decision of one of its nodes."""
    if node.name == verdict.node:
        return verdict
    own = facts.base(node, facts.hits[node.name])
    return replace(
        verdict,
        node=node.name,
        operator=own.operator,
        module_path=own.module_path,
        reasons=tuple(replace(reason, node=node.name) for reason in verdict.reasons),
    )


def _unmatched(node: fx.Node, facts: _Facts) -> Decision:
    base = facts.base(node, facts.hits[node.name])
    if node.name in facts.valueless or facts.graph.is_part_of_tuple(node):
        return replace(base, outcome=Outcome.NOT_TENSOR)
    kinds = facts.custom.kinds(facts.graph.module_of(node))
    if kinds:
        return replace(base, reasons=(facts.writer.other_kind(node, kinds, base),))
    opaque = facts.graph.is_opaque(node)
    reason: Reason = facts.writer.not_traced(node) if opaque else facts.writer.no_entry(node)
    return replace(base, reasons=(reason,))


def _of_another(mapping: QConfigMapping, backend: BackendConfig) -> Iterator[str]:
    """A note where the defaults of one backend are asked of another."""
    if mapping.default_of not in ("", backend.name):
        yield (
            f"planned for {backend.name or 'the description'}, with the default QConfigs of "
            f"{mapping.default_of}: name that backend, too (backend=, in prepare_fx backend_config=)"
        )


def _uncalled(facts: _Facts) -> tuple[str, ...]:
    called = [str(node.target) for node in facts.graph.calls() if node.op == "call_module"]
    return tuple(
        f'standalone module "{name}" is called nowhere in the traced model'
        for name in facts.custom.uncalled(called)
    )


def _unreached(
    backend: BackendConfig, matches: tuple[Match, ...], fusions: tuple[Fusion, ...]
) -> tuple[int, ...]:
    reached = {match.entry for match in matches} | {fusion.entry for fusion in fusions}
    return tuple(entry for entry in range(len(backend.shared_configs)) if entry not in reached)


def _with_class(fusion: Fusion, graph: GraphIndex) -> Fusion:
    """A fusion with the class that its fuser really gave."""
    node = graph.nodes.get(fusion.root)
    fused = graph.module_of(node) if node is not None else None
    if fused is None:
        return fusion
    cls = type(fused)
    return replace(fusion, fused_module=f"{cls.__module__}.{cls.__qualname__}")
