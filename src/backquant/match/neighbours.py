"""Operators that a target leaves in float at some places (``QDQRules.leave_float``).

1. What a rule leaves in float at places of the float model (``left_in_float``) stays float first.
2. ``beside_float``: a match of such operators only is quantized when every activation that it reads comes
   out of a match that stays quantized with an integer output, and a match that stays quantized reads its
   result as integers.
3. A value that depends on no input counts as quantized where the target quantizes constants.
4. What one match loses may cost its neighbours the same: the largest set that satisfies 2 is kept. Each
   match is looked at again only when a neighbour has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from backquant.backend_config import BackendConfig, QDQRules
from backquant.graph import GraphIndex
from backquant.graph.constants import input_independent
from backquant.match.left_float import left_in_float
from backquant.match.occurrences import Occurrence
from backquant.match.plan import Decision, MatchKind, Outcome, Reason

__all__ = ["settle_neighbours"]


def settle_neighbours(
    graph: GraphIndex,
    backend: BackendConfig,
    found: list[Occurrence],
    decisions: Mapping[str, Decision],
) -> dict[str, Decision]:
    """``decisions`` with the matches in float that the rules leave there, each with its reason.

    >>> import torch
    >>> gm = fx.symbolic_trace(lambda x: torch.relu(x))
    >>> settle_neighbours(GraphIndex(gm), BackendConfig("b"), [], {})
    {}
    """
    rules = backend.qdq or QDQRules()
    if not any(rule.beside_float or rule.at_places for rule in rules.leave_float):
        return dict(decisions)
    return _Settling(graph, backend, rules, found, dict(decisions)).run()


@dataclass
class _Settling:
    graph: GraphIndex
    backend: BackendConfig
    rules: QDQRules
    found: list[Occurrence]
    decisions: dict[str, Decision]
    of_node: dict[str, Occurrence] = field(default_factory=dict)
    # the rule that each match is about that must stand between quantized ones, by anchor
    bound: dict[str, int] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)

    def run(self) -> dict[str, Decision]:
        rules = self.rules.leave_float
        listed = [(i, set(rule.operators)) for i, rule in enumerate(rules) if rule.beside_float]
        for occurrence in self.found:
            self.of_node.update((node.name, occurrence) for node in occurrence.members)
            if occurrence.match.kind is MatchKind.PATTERN:
                rule = next((i for i, own in listed if self._is_listed(occurrence, own)), None)
                if rule is not None:
                    self.bound[occurrence.anchor.name] = rule
        self._leave_places()
        self.constants = input_independent(self.graph.graph)
        waiting = [o for o in self.found if o.anchor.name in self.bound]
        while waiting:
            occurrence = waiting.pop()
            if not self._quantized(occurrence):
                continue
            lack = self._lack(occurrence)
            if lack:
                admitted = f"only between quantized operators, and {lack}"
                rule = self.bound[occurrence.anchor.name]
                self._leave(occurrence, "float-neighbours", admitted, rule)
                waiting += self._neighbours(occurrence)
        return self.decisions

    def _leave_places(self) -> None:
        for left in left_in_float(self.graph, self.rules.leave_float):
            occurrence = self.of_node.get(left.node)
            if occurrence is not None and self._quantized(occurrence):
                admitted = f"float at this place: {self.rules.leave_float[left.rule]!r}"
                self._leave(occurrence, "float-place", admitted, left.rule)

    def _is_listed(self, occurrence: Occurrence, listed: set[object]) -> bool:
        pattern = self.backend.configs[occurrence.match.entry].normal_pattern
        operators = [node.op for node in pattern.nodes if node.kind not in ("any", "literal")]
        return all(operator in listed for operator in operators)

    def _quantized(self, occurrence: Occurrence | None) -> bool:
        return occurrence is not None and self.decisions[occurrence.anchor.name].quantized

    def _lack(self, occurrence: Occurrence) -> str:
        """Why it cannot stay quantized; empty if it can."""
        for source in self._sources(occurrence):
            if not self._gives_integers(source):
                return f"it reads {source.name}, which is float"
        if not any(self._reads_integers(user) for user in occurrence.anchor.users):
            return "no quantized operator reads its result"
        return ""

    def _sources(self, occurrence: Occurrence) -> list[fx.Node]:
        members = set(occurrence.members)
        sources = (s for node in occurrence.members for s in node.all_input_nodes)
        return [s for s in dict.fromkeys(sources) if s not in members and self._is_tensor(s)]

    def _is_tensor(self, node: fx.Node) -> bool:
        decision = self.decisions.get(node.name)
        return decision is None or decision.outcome is not Outcome.NOT_TENSOR

    def _gives_integers(self, node: fx.Node) -> bool:
        if node.name in self.constants:
            return self.rules.quantize_constants
        occurrence = self.of_node.get(node.name)
        return occurrence is not None and self._in_integers(occurrence, "output_dtype")

    def _reads_integers(self, node: fx.Node) -> bool:
        occurrence = self.of_node.get(node.name)
        return occurrence is not None and self._in_integers(occurrence, "input_dtype")

    def _in_integers(self, occurrence: Occurrence, role: str) -> bool:
        decision = self.decisions[occurrence.anchor.name]
        if not decision.quantized or decision.observation.endswith("NOT_OBSERVED"):
            return False
        if occurrence.config is None or decision.dtype_config is None:
            return True  # custom and standalone modules
        dtypes = occurrence.config.dtype_configs[decision.dtype_config]
        dtype = getattr(dtypes, role)
        return not dtypes.is_dynamic and (dtype is None or not dtype.is_floating_point)

    def _neighbours(self, occurrence: Occurrence) -> list[Occurrence]:
        nodes = [*self._sources(occurrence), *occurrence.anchor.users]
        near = (self.of_node.get(node.name) for node in nodes)
        return [o for o in near if o is not None and o.anchor.name in self.bound]

    def _leave(self, occurrence: Occurrence, code: str, admitted: str, rule: int) -> None:
        for node in occurrence.members:
            decision = self.decisions[node.name]
            reason = Reason(
                node.name,
                code,
                asked="quantized",
                admitted=admitted,
                place=f"{self.backend.name}, qdq.leave_float[{rule}]",
            )
            self.decisions[node.name] = replace(
                decision,
                outcome=Outcome.FLOAT,
                dtype_config=None,
                reasons=(*decision.reasons, reason),
            )
