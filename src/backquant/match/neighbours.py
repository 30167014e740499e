"""Operators that a target quantizes only between quantized operators (``QDQRules``, rule 6).

1. A match of such operators only is quantized when every activation that it reads comes out of a match
   that stays quantized with an integer output, and a match that stays quantized reads its result as
   integers.
2. A value that depends on no input counts as quantized where the target quantizes constants.
3. What one match loses may cost its neighbours the same: the largest set that satisfies 1 is kept. Each
   match is looked at again only when a neighbour has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from backquant.backend_config import BackendConfig, QDQRules
from backquant.graph import GraphIndex
from backquant.graph.constants import input_independent
from backquant.match.occurrences import Occurrence
from backquant.match.plan import Decision, MatchKind, Outcome, Reason

__all__ = ["settle_neighbours"]


def settle_neighbours(
    graph: GraphIndex,
    backend: BackendConfig,
    found: list[Occurrence],
    decisions: Mapping[str, Decision],
) -> dict[str, Decision]:
    """``decisions`` with the matches in float that rule 1 leaves there, each with its reason.

    >>> import torch
    >>> gm = fx.symbolic_trace(lambda x: torch.relu(x))
    >>> settle_neighbours(GraphIndex(gm), BackendConfig("b"), [], {})
    {}
    """
    rules = backend.qdq or QDQRules()
    if not rules.only_between_quantized:
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
    bound: set[str] = field(default_factory=set)  # anchors of the matches that the rule is about
    constants: set[str] = field(default_factory=set)

    def run(self) -> dict[str, Decision]:
        listed = set(self.rules.only_between_quantized)
        for occurrence in self.found:
            self.of_node.update((node.name, occurrence) for node in occurrence.members)
            if occurrence.match.kind is MatchKind.PATTERN and self._is_listed(occurrence, listed):
                self.bound.add(occurrence.anchor.name)
        self.constants = input_independent(self.graph.graph)
        waiting = [o for o in self.found if o.anchor.name in self.bound]
        while waiting:
            occurrence = waiting.pop()
            if not self._quantized(occurrence):
                continue
            lack = self._lack(occurrence)
            if lack:
                self._leave(occurrence, lack)
                waiting += self._neighbours(occurrence)
        return self.decisions

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

    def _leave(self, occurrence: Occurrence, lack: str) -> None:
        for node in occurrence.members:
            decision = self.decisions[node.name]
            reason = Reason(
                node.name,
                "float-neighbours",
                asked="quantized",
                admitted=f"only between quantized operators, and {lack}",
                place=f"{self.backend.name}, only_between_quantized",
            )
            self.decisions[node.name] = replace(
                decision,
                outcome=Outcome.FLOAT,
                dtype_config=None,
                reasons=(*decision.reasons, reason),
            )
