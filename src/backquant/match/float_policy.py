"""Operators that stay float at some places: always (``QDQRules.leave_float``) or by default
(``BackendDefaults.leave_float``, ``unless_between_quantized``).

1. What a rule leaves in float at places of the float model (``find_float_places``) stays float first.
2. ``unless_between_quantized``: a match of such operators only is quantized when every activation that it
   reads comes out of a match that stays quantized with an integer output, and a match that stays quantized
   reads its result as integers. What only moves values, and so gives the integers that it reads, takes no
   others than its entry has. Of rules by default, an operator that only moves one value needs the latter
   alone, since rounding before or behind it gives the same values; and moves that no entry is for
   (``chunk``, ``nn.Flatten``, dropped paths) are looked through in both directions.
3. A value that depends on no input counts as quantized where the target quantizes constants.
4. What one match loses may cost its neighbours the same: the largest set that satisfies 2 is kept. Each
   match is looked at again only when a neighbour has changed.
5. A rule by default does not hold where the request names the place (``DefaultRules``).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from backquant.backend_config import BackendConfig, LeaveFloat, QDQRules
from backquant.dtypes import dtype_name
from backquant.graph import GraphIndex
from backquant.graph.modes import passed_on_in_evaluation
from backquant.graph.queries import input_independent
from backquant.match.default_rules import DefaultRules
from backquant.match.float_places import find_float_places
from backquant.match.occurrences import Occurrence
from backquant.match.plan import Decision, MatchKind, Outcome, Plan, Reason
from backquant.operators import find, moves_values
from backquant.reason_codes import ReasonCode

_BY_DEFAULT = ", defaults.leave_float"


def float_by_request(plan: Plan, graph: GraphIndex) -> set[str]:
    """The nodes that compute in float even between integers: the mapping leaves them in float.

    An operator that only moves values moves integers, where no rule of the mapping names it.
    """
    return {
        name
        for name, decision in plan.decisions.items()
        if any(reason.rule == ReasonCode.QCONFIG_NONE for reason in decision.reasons)
        and (node := graph.nodes.get(name)) is not None
        and (decision.rule is not None or not _moves_values(graph, node))
    }


def left_by_default(plan: Plan, decision: Decision) -> bool:
    """True if only a default rule keeps it in float.

    >>> from backquant.match.plan import Outcome
    >>> left_by_default(Plan("x86"), Decision("fc", "Linear", "fc", Outcome.FLOAT))
    False
    """
    rules = f"{plan.backend}{_BY_DEFAULT}"
    return bool(decision.reasons) and decision.reasons[-1].place.startswith(rules)


def _moves_values(graph: GraphIndex, node: fx.Node) -> bool:
    """Whether a node moves values; dropout counts, which does nothing in evaluation."""
    key = graph.key(node)
    if key is None:
        return False
    known = find(key.op)
    return moves_values(key.op) or (known is not None and known.family == "dropout")


class _Rule(NamedTuple):
    """A rule, and where it stands."""

    rule: LeaveFloat
    place: str
    by_default: bool


def settle_neighbours(
    graph: GraphIndex,
    backend: BackendConfig,
    found: list[Occurrence],
    decisions: Mapping[str, Decision],
    by_default: DefaultRules | None = None,
) -> dict[str, Decision]:
    """``decisions`` with the matches in float that the rules leave there, each with its reason."""
    always, by_default = backend.qdq or QDQRules(), by_default or DefaultRules(())
    rules = [
        _Rule(rule, f"{backend.name}, qdq.leave_float[{i}]", False)
        for i, rule in enumerate(always.leave_float)
        if rule.unless_between_quantized or rule.at_places
    ]
    rules += [
        _Rule(rule, f"{backend.name}{_BY_DEFAULT}[{i}]", True)
        for i, rule in enumerate(by_default.rules)
        if rule.unless_between_quantized or (rule.at_places and by_default.in_training)
    ]
    if not rules:
        return dict(decisions)
    return _Settling(graph, backend, always, rules, found, dict(decisions), by_default).run()


@dataclass
class _Settling:
    graph: GraphIndex
    backend: BackendConfig
    always: QDQRules
    rules: list[_Rule]
    found: list[Occurrence]
    decisions: dict[str, Decision]
    by_default: DefaultRules
    of_node: dict[str, Occurrence] = field(default_factory=dict)
    # for each match (by its anchor) that must be between quantized ones: the rule that says so
    bound: dict[str, _Rule] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)

    def run(self) -> dict[str, Decision]:
        listed = [
            (one, set(one.rule.operators))
            for one in self.rules
            if one.rule.unless_between_quantized
        ]
        for occurrence in self.found:
            self.of_node.update((node.name, occurrence) for node in occurrence.members)
            if occurrence.match.kind is MatchKind.PATTERN:
                about = (one for one, own in listed if self._is_about(one, own, occurrence))
                rule = next(about, None)
                if rule is not None:
                    self.bound[occurrence.anchor.name] = rule
        self._leave_places()
        self.constants = input_independent(self.graph.graph)
        self._settle()
        self._leave_moves_of_floats()
        return self.decisions

    def _settle(self) -> None:
        waiting = [o for o in self.found if o.anchor.name in self.bound]
        moves = MovesBetween(
            self.graph.graph.nodes,
            self._is_open_move,
            self._is_tensor,
            self._gives_integers,
            self._reads_integers,
        )
        while waiting:
            occurrence = waiting.pop()
            if not self._quantized(occurrence):
                continue
            lack = self._lack(occurrence, moves)
            if lack:
                waiting += self._turn_to_float(occurrence, lack, moves)

    def _leave_moves_of_floats(self) -> None:
        """Leave moves (``view``, ``transpose``) in float that get a float value and pass it only to float
        operators."""
        moves = {
            node: self.of_node[node.name]
            for node in self.graph.graph.nodes
            if node.name in self.bound
            and self._quantized(self.of_node[node.name])
            and self._moves_one_value(self.of_node[node.name])
        }
        read = set[fx.Node]()
        for move in reversed(moves):
            if any(u in read if u in moves else self._reads_integers(u) for u in move.users):
                read.add(move)
        for move, occurrence in moves.items():
            if move in read:
                continue
            floats = [s.name for s in self._sources(occurrence) if not self._gives_integers(s)]
            if floats:
                lack = f"it reads {floats[0]}, which is float"
                self._leave_between(occurrence, lack)

    def _leave_places(self) -> None:
        rules = [one for one in self.rules if not one.by_default or self.by_default.in_training]
        for left in find_float_places(self.graph, [one.rule for one in rules]):
            occurrence, rule = self.of_node.get(left.node), rules[left.rule]
            if occurrence is not None and self._quantized(occurrence):
                if rule.by_default and self._is_named(occurrence):
                    continue
                admitted = f"float at this place: {rule.rule!r}"
                self._leave(occurrence, ReasonCode.FLOAT_PLACE, admitted, rule)

    def _is_about(self, rule: _Rule, listed: set[object], occurrence: Occurrence) -> bool:
        if rule.by_default and self._is_named(occurrence):
            return False
        pattern = self.backend.shared_configs[occurrence.match.entry].normal_pattern
        operators = [node.op for node in pattern.nodes if node.kind not in ("any", "literal")]
        return all(each in listed for each in operators)

    def _is_named(self, occurrence: Occurrence) -> bool:
        """Whether the request names the place."""
        decisions = (self.decisions[node.name] for node in occurrence.members)
        return any(map(self.by_default.named, decisions))

    def _quantized(self, occurrence: Occurrence | None) -> bool:
        return occurrence is not None and self.decisions[occurrence.anchor.name].quantized

    def _lack(self, occurrence: Occurrence, moves: MovesBetween) -> str:
        """Why it cannot stay quantized; empty if it can."""
        by_default = self.bound[occurrence.anchor.name].by_default
        if not (by_default and self._moves_one_value(occurrence)):
            for source in self._sources(occurrence):
                if not (
                    self._gives_integers(source) or (by_default and moves.gives_integers(source))
                ):
                    return f"it reads {source.name}, which is float"
        reads = moves.reads_integers if by_default else self._reads_integers
        if not any(map(reads, occurrence.anchor.users)):
            return "no quantized operator reads its result"
        return self._other_integers(occurrence) if self._moves_one_value(occurrence) else ""

    def _other_integers(self, occurrence: Occurrence) -> str:
        """Which source of a move gives integers of another dtype than the move takes; empty if none does."""
        taken = self._dtype(occurrence, "input_dtype")
        for source in self._sources(occurrence):
            giver = self.of_node.get(source.name)
            if taken is None or giver is None or not self._gives_integers(source):
                continue
            given = self._dtype(giver, "output_dtype")
            if given not in (None, taken):
                return f"it reads {source.name}, which is {dtype_name(given)}"
        return ""

    def _dtype(self, occurrence: Occurrence, role: str) -> Any:
        chosen = self.decisions[occurrence.anchor.name].dtype_config
        if occurrence.config is None or chosen is None:
            return None
        return getattr(occurrence.config.dtype_configs[chosen], role)

    def _turn_to_float(
        self, occurrence: Occurrence, lack: str, moves: MovesBetween
    ) -> list[Occurrence]:
        """Leave it in float; the matches between others that this may change."""
        members = occurrence.members
        giving = [node for node in members if self._gives_integers(node)]
        reading = [node for node in members if self._reads_integers(node)]
        self._leave_between(occurrence, lack)
        # constants give integers even where the match is float
        giving = [node for node in giving if not self._gives_integers(node)]
        givers = [*members, *moves.give_floats(giving)]
        readers = [*members, *moves.read_floats(reading)]
        nodes = [source for node in readers for source in node.all_input_nodes]
        nodes += [user for node in givers for user in node.users]
        near = (self.of_node.get(node.name) for node in dict.fromkeys(nodes))
        return [o for o in near if o is not None and o.anchor.name in self.bound]

    def _is_open_move(self, node: fx.Node) -> bool:
        """Whether ``node`` moves values, and no entry is for it."""
        if node.name in self.of_node:
            return False
        if node.target is operator.getitem or _moves_values(self.graph, node):
            return True
        return passed_on_in_evaluation(self.graph.modules, node) is not None

    def _moves_one_value(self, occurrence: Occurrence) -> bool:
        if len(self._sources(occurrence)) > 1:
            return False
        return all(_moves_values(self.graph, node) for node in occurrence.members)

    def _sources(self, occurrence: Occurrence) -> list[fx.Node]:
        members = set(occurrence.members)
        sources = (s for node in occurrence.members for s in node.all_input_nodes)
        return [s for s in dict.fromkeys(sources) if s not in members and self._is_tensor(s)]

    def _is_tensor(self, node: fx.Node) -> bool:
        decision = self.decisions.get(node.name)
        return decision is None or decision.outcome is not Outcome.NOT_TENSOR

    def _gives_integers(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return self.by_default.in_training
        if node.name in self.constants:
            return self.always.quantize_constants
        occurrence = self.of_node.get(node.name)
        return occurrence is not None and self._in_integers(occurrence, "output_dtype")

    def _reads_integers(self, node: fx.Node) -> bool:
        if node.op == "output":
            return self.by_default.in_training
        occurrence = self.of_node.get(node.name)
        return occurrence is not None and self._in_integers(occurrence, "input_dtype")

    def _in_integers(self, occurrence: Occurrence, role: str) -> bool:
        decision = self.decisions[occurrence.anchor.name]
        if not decision.quantized or decision.observation.endswith("NOT_OBSERVED"):
            return False
        if occurrence.config is None or decision.dtype_config is None:
            return True  # custom and standalone modules: no entry says otherwise
        dtypes = occurrence.config.dtype_configs[decision.dtype_config]
        dtype = self._dtype(occurrence, role)
        return not dtypes.is_dynamic and (dtype is None or not dtype.is_floating_point)

    def _leave_between(self, occurrence: Occurrence, lack: str) -> None:
        admitted = f"only between quantized operators, and {lack}"
        rule = self.bound[occurrence.anchor.name]
        self._leave(occurrence, ReasonCode.FLOAT_NEIGHBOURS, admitted, rule)

    def _leave(self, occurrence: Occurrence, code: ReasonCode, admitted: str, rule: _Rule) -> None:
        for node in occurrence.members:
            reason = Reason(node.name, code, "quantized", admitted, place=rule.place)
            self.decisions[node.name] = self.decisions[node.name].refused(reason)


# What lies before and behind moves that no entry is for (``chunk``, ``nn.Flatten``).
#
# Such a move is looked through in both directions: it gives integers where all that it moves came as
# integers, and its input is read as integers where its result is. Operators turn to float while the plan is
# settled, never back; each edge of the graph is then followed once at most.

_Condition = Callable[[fx.Node], bool]


class MovesBetween:
    """The moves of a graph, with what they give and what reads them.

    Args:
        nodes: of the graph, each after its inputs.
        is_move: whether a node moves values, and no entry is for it.
        is_tensor, gives_integers, reads_integers: of other nodes, as things stand.
    """

    def __init__(
        self,
        nodes: Iterable[fx.Node],
        is_move: _Condition,
        is_tensor: _Condition,
        gives_integers: _Condition,
        reads_integers: _Condition,
    ) -> None:
        ordered = list(nodes)
        moves = [node for node in ordered if is_move(node)]
        # for each move, the number of its users that read integers or pass the value on to such a reader
        self._readers = dict.fromkeys(moves, 0)
        self._of_integers = set[fx.Node]()
        of_sizes = set[fx.Node]()
        for move in moves:
            inputs = move.all_input_nodes
            moved = [
                n for n in inputs if (n not in of_sizes if n in self._readers else is_tensor(n))
            ]
            known = (
                n in self._of_integers if n in self._readers else gives_integers(n) for n in moved
            )
            if not moved:
                of_sizes.add(move)
            elif all(known):
                self._of_integers.add(move)
        self._reads = reads_integers
        for move in reversed(moves):
            self._readers[move] = sum(map(self.reads_integers, move.users))

    def gives_integers(self, node: fx.Node) -> bool:
        """Whether ``node`` is a move of values that came as integers."""
        return node in self._of_integers

    def reads_integers(self, node: fx.Node) -> bool:
        """Whether ``node`` reads its input as integers, or is a move that passes it on to what does."""
        readers = self._readers.get(node)
        return self._reads(node) if readers is None else readers > 0

    def give_floats(self, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """``nodes`` give floats from now on: the moves that give floats because of that."""
        pending = list(nodes)
        while pending:
            moved = [user for user in pending.pop().users if user in self._of_integers]
            self._of_integers.difference_update(moved)
            pending += moved
            yield from moved

    def read_floats(self, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
        """``nodes`` read floats from now on: the moves that nothing reads as integers any more."""
        pending = list(nodes)
        while pending:
            for move in pending.pop().all_input_nodes:
                if move in self._readers:
                    self._readers[move] -= 1
                    if not self._readers[move]:
                        pending.append(move)
                        yield move
