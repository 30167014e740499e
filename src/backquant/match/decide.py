"""The plan of a graph: every match, every verdict, every reason. Edits nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import fx

from backquant.backend_config import BackendConfig, BackendPatternConfig, ObservationType
from backquant.graph import GraphIndex, Scope, known_types, node_arguments
from backquant.match.asks import AskReader
from backquant.match.custom import CustomMatching
from backquant.match.index import PatternIndex
from backquant.match.matcher import Found, Matcher
from backquant.match.names import op_name, pattern_text
from backquant.match.notes import unused_rules
from backquant.match.plan import (
    Decision,
    Fusion,
    Match,
    MatchKind,
    Outcome,
    Plan,
    Predicate,
    Reason,
    RuleRef,
)
from backquant.match.reasons import ReasonWriter
from backquant.match.rules import Hit, RuleTable, resolve
from backquant.match.structure import flattened, root_of
from backquant.match.verdict import Asks, Roles, Ruling, judge
from backquant.qconfig import QConfigMapping

__all__ = ["plan"]

_SHARES = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT


def plan(
    module: fx.GraphModule,
    scopes: Mapping[str, Scope],
    backend_config: BackendConfig,
    qconfig_mapping: QConfigMapping,
    *,
    fusions: tuple[Fusion, ...] = (),
    custom: CustomMatching | None = None,
) -> Plan:
    """Decide for every node of a (fused) graph what it becomes, and say why.

    Args:
        module: the graph.
        scopes: the scope of each node, by name; names of fused-away nodes may be among them.
        backend_config: what the backend can do.
        qconfig_mapping: what is asked for.
        fusions: what was fused before, for rules about the parts of fused modules.
        custom: modules that are no patterns.

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
    >>> decided = plan(
    ...     captured.module, captured.scopes,
    ...     BackendConfig("b").set_backend_pattern_config(entry),
    ...     QConfigMapping().set_global(default_qconfig))
    >>> [(d.operator, d.outcome.value) for d in decided.decisions.values()]
    [('Linear', 'quantized'), ('Softplus', 'float')]
    """
    planner = _Planner(module, scopes, backend_config, custom or CustomMatching())
    return planner.plan(qconfig_mapping, fusions)


class _Planner:
    """The indexes of one graph and one backend, and what was decided so far."""

    def __init__(
        self,
        module: fx.GraphModule,
        scopes: Mapping[str, Scope],
        backend: BackendConfig,
        custom: CustomMatching,
    ) -> None:
        self._graph = GraphIndex(module)
        self._scopes = scopes
        self._backend = backend
        self._entries = backend.configs
        self._custom = custom
        self._patterns = PatternIndex(backend)
        self._asks = AskReader()
        self._judged: dict[tuple[Any, ...], Ruling] = {}

    def plan(self, mapping: QConfigMapping, fusions: tuple[Fusion, ...]) -> Plan:
        table = RuleTable(mapping)
        hits = resolve(self._graph, self._scopes, table, self._backend, fusions)
        writer = ReasonWriter(self._backend, self._graph, self._patterns, self._scopes)
        found = self._matches()
        observed = [self._observation(match, root) for _, match, root in found]
        no_tensors = self._no_tensors(found, observed)
        decisions: dict[str, Decision] = {}
        predicates: list[Predicate] = []
        for number, (members, match, root) in enumerate(found):
            made = self._decide(match, number, root, observed[number], hits, no_tensors, writer)
            predicates += made[1]
            for node in members:
                own = made[0] if node.name == match.anchor else self._member(made[0], node, hits)
                decisions[node.name] = own
        for node in self._graph.calls():
            if node.name not in decisions:
                decisions[node.name] = self._unmatched(node, hits[node.name], no_tensors, writer)
        ordered = {node.name: decisions[node.name] for node in self._graph.calls()}
        matches = tuple(match for _, match, _ in found)
        reached = {match.entry for match in matches} | {fusion.entry for fusion in fusions}
        unused, notes = unused_rules(table, ordered, self._scopes, fusions)
        return Plan(
            backend=self._backend.name,
            fusions=self._named(fusions),
            matches=matches,
            decisions=ordered,
            unused_rules=unused,
            notes=notes,
            unreached_entries=tuple(i for i in range(len(self._entries)) if i not in reached),
            predicates=tuple(predicates),
            no_tensors=tuple(name for name in self._graph.nodes if name in no_tensors),
        )

    # -- matches -----------------------------------------------------------------------------------

    def _matches(self) -> list[tuple[list[fx.Node], Match, fx.Node]]:
        special: list[tuple[list[fx.Node], Match, fx.Node]] = []
        for node in self._graph.calls():
            kind = self._special_kind(node)
            if kind is not None:
                name = op_name(type(self._graph.module_of(node)))
                special.append(([node], Match(-1, name, (node.name,), node.name, kind), node))
        found = Matcher(self._graph, self._patterns).run(skip=[root for _, _, root in special])
        merged = special + [self._pattern_match(match) for match in found]
        return sorted(merged, key=lambda item: self._graph.position[item[0][-1]])

    def _special_kind(self, node: fx.Node) -> MatchKind | None:
        module = self._graph.module_of(node)
        if module is None:
            return None
        if self._custom.is_standalone(str(node.target), module):
            return MatchKind.STANDALONE
        return MatchKind.CUSTOM_MODULE if self._custom.is_custom(module) else None

    def _pattern_match(self, found: Found) -> tuple[list[fx.Node], Match, fx.Node]:
        root = root_of(found, self._backend, flattened)
        members = sorted(found.members, key=self._graph.position.__getitem__)
        names = tuple(node.name for node in members)
        candidate = found.candidate
        match = Match(candidate.entry, pattern_text(candidate.pattern), names, root.name)
        return members, match, root

    def _observation(self, match: Match, root: fx.Node) -> ObservationType | int:
        """The observation type of an occurrence, or the number of tensors that has none."""
        if match.entry < 0:
            return ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
        config = self._entries[match.entry]
        by_count = config._num_tensor_args_to_observation_type
        if not by_count:
            return config.observation_type
        count = sum(
            isinstance(value, fx.Node) and not self._graph.has_no_tensors(value)
            for value in node_arguments(root)
        )
        return by_count.get(count, count)

    def _no_tensors(
        self,
        found: list[tuple[list[fx.Node], Match, fx.Node]],
        observed: list[ObservationType | int],
    ) -> frozenset[str]:
        """Names of nodes whose value is certainly no float tensor."""
        shares = {
            node
            for (members, _, _), observation in zip(found, observed, strict=True)
            for node in members
            if observation is _SHARES
        }
        known = known_types(self._graph.graph, shares.__contains__)
        computed = (node for node in self._graph.calls() if self._graph.has_no_tensors(node))
        return frozenset(node.name for node in (*known, *computed))

    # -- decisions ---------------------------------------------------------------------------------

    def _decide(
        self,
        match: Match,
        number: int,
        root: fx.Node,
        observation: ObservationType | int,
        hits: Mapping[str, Hit],
        no_tensors: frozenset[str],
        writer: ReasonWriter,
    ) -> tuple[Decision, list[Predicate]]:
        # Seven facts about one occurrence; bundling them would only rename them.
        anchor = self._graph.nodes[match.anchor]
        hit = self._match_hit(match, hits)
        asks = self._read(hit)
        base = replace(
            self._base(anchor, hit, asks),
            match=number,
            observation=observation.name if isinstance(observation, ObservationType) else "",
        )
        if hit.qconfig is None:
            if anchor.name in no_tensors:
                return replace(base, outcome=Outcome.NOT_TENSOR), []
            return replace(base, reasons=(writer.no_qconfig(anchor, hit),)), []
        if match.kind is not MatchKind.PATTERN:
            return replace(base, outcome=Outcome.QUANTIZED), []
        config = self._entries[match.entry]
        if not isinstance(observation, ObservationType):
            return replace(base, reasons=(writer.tensor_count(anchor, match, observation),)), []
        roles = self._roles(root, anchor, config, no_tensors)
        ruling = self._rule(match.entry, config, asks, roles)
        if ruling.dtype_config is not None:
            admitted = replace(
                base, outcome=Outcome.QUANTIZED, dtype_config=ruling.dtype_config
            )
            place = writer.place(match.entry, ruling.dtype_config)
            return admitted, [
                Predicate(anchor.name, role, rule, bound, demand, place)
                for role, rule, bound, demand in ruling.predicates
            ]
        if anchor.name in no_tensors or not roles.input_known:
            return replace(base, outcome=Outcome.NOT_TENSOR), []
        reasons = writer.refused(anchor, match, hit, asks, roles, ruling)
        return replace(base, reasons=reasons), []

    def _match_hit(self, match: Match, hits: Mapping[str, Hit]) -> Hit:
        """The anchor's rule, or the ``None`` of any node of the match: a skip is honoured."""
        anchor = hits[match.anchor]
        for name in match.nodes:
            hit = hits[name]
            if hit.rule is not None and hit.qconfig is None and anchor.qconfig is not None:
                return Hit(hit.rule, None, anchor.use)
        return anchor

    def _read(self, hit: Hit) -> Asks:
        where = f"QConfigMapping: {hit.rule}"
        return Asks(
            self._asks.activation(hit.qconfig, where), self._asks.weight(hit.qconfig, where)
        )

    def _rule(
        self, entry: int, config: BackendPatternConfig, asks: Asks, roles: Roles
    ) -> Ruling:
        key = (entry, id(asks.activation), id(asks.weight), roles)
        if key not in self._judged:
            self._judged[key] = judge(config, asks, roles)
        return self._judged[key]

    def _roles(
        self,
        root: fx.Node,
        anchor: fx.Node,
        config: BackendPatternConfig,
        no_tensors: frozenset[str],
    ) -> Roles:
        roles = set(self._argument_roles(root))
        if root.op == "call_module" and config.root_module is not None:
            roles |= {"weight", "bias"}
        return Roles(
            activation="input" in roles,
            weight="weight" in roles,
            bias="bias" in roles,
            input_known=root.name not in no_tensors,
            output_known=anchor.name not in no_tensors,
        )

    def _argument_roles(self, root: fx.Node) -> list[str]:
        places: dict[str, int] = {}
        if root.op == "call_function":
            key = self._graph.key(root)
            assert key is not None
            single = (c for c in self._patterns.candidates(key) if len(c.pattern.nodes) == 1)
            places = next((c.config._input_type_to_index for c in single), {})
        by_keyword = {id(root.kwargs[name]): name for name in ("bias", "weight") if name in root.kwargs}
        by_place = {
            id(root.args[i]): name
            for name in ("bias", "weight")
            if (i := places.get(name)) is not None and i < len(root.args)
        }
        roles = {**by_keyword, **by_place}
        found: list[str] = []
        pending = list(node_arguments(root))
        while pending:
            value = pending.pop()
            if isinstance(value, (list, tuple)):
                pending.extend(value)
            elif isinstance(value, fx.Node):
                found.append(roles.get(id(value), "input"))
        return found

    def _base(self, node: fx.Node, hit: Hit, asks: Asks) -> Decision:
        key = self._graph.key(node)
        scope = self._scopes.get(node.name)
        return Decision(
            node=node.name,
            operator=op_name(key.op) if key is not None else node.op,
            module_path=scope.path if scope is not None else "",
            outcome=Outcome.FLOAT,
            rule=hit.rule,
            asked_activation=asks.activation,
            asked_weight=asks.weight,
        )

    def _member(self, verdict: Decision, node: fx.Node, hits: Mapping[str, Hit]) -> Decision:
        """The decision of the match's anchor, as that of another of its nodes."""
        own = self._base(node, hits[node.name], Asks(None, None))
        return replace(
            verdict,
            node=node.name,
            operator=own.operator,
            module_path=own.module_path,
            reasons=tuple(replace(reason, node=node.name) for reason in verdict.reasons),
        )

    def _unmatched(
        self, node: fx.Node, hit: Hit, no_tensors: frozenset[str], writer: ReasonWriter
    ) -> Decision:
        base = self._base(node, hit, self._read(hit))
        if node.name in no_tensors:
            return replace(base, outcome=Outcome.NOT_TENSOR)
        reason: Reason
        if self._graph.is_opaque(node):
            reason = writer.not_traced(node)
        else:
            reason = writer.no_entry(node)
        return replace(base, reasons=(reason,))

    def _named(self, fusions: tuple[Fusion, ...]) -> tuple[Fusion, ...]:
        """Fusions with the class that the fuser really gave."""
        named = []
        for fusion in fusions:
            node = self._graph.nodes.get(fusion.root)
            fused = self._graph.module_of(node) if node is not None else None
            if fused is not None:
                cls = type(fused)
                fusion = replace(fusion, fused_module=f"{cls.__module__}.{cls.__qualname__}")
            named.append(fusion)
        return tuple(named)


def used_rules(decisions: Mapping[str, Decision]) -> set[RuleRef]:
    """The rules that applied to some node."""
    return {decision.rule for decision in decisions.values() if decision.rule is not None}
