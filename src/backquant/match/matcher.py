"""Patterns against a graph.

Rules (PyTorch's)

1. Nodes are visited in reverse order; the first candidate of the anchor that fits takes the node.
2. An operator inside a pattern is used by the pattern only. Its class, function or method name is
   compared exactly.
3. A pattern that lists arguments lists all of them. Positional arguments are compared as they
   stand; arguments given by keyword take their places first, ``inplace`` and defaults do not count.
4. Nodes that ``MatchAllNode`` stands for are inputs of the match and no part of it.

Beyond PyTorch: a node that stands several times in a pattern is one node, and operators marked
``any_order`` are tried with their arguments as they stand, then the other way round. An input of a
graph pattern is no node of the match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations
from typing import Any, NamedTuple

from torch import fx

from backquant.backend_config import BackendConfig, BackendPatternConfig, GraphPattern
from backquant.backend_config.pattern import NormalPattern, PatternNode
from backquant.graph import GraphIndex, OperatorKey
from backquant.graph.arguments import ordered_arguments
from backquant.match.refusal import op_name


@dataclass(frozen=True)
class Found:
    """A candidate with the value that is bound to each node of its pattern."""

    candidate: Candidate
    bound: tuple[Any, ...]

    @property
    def anchor(self) -> fx.Node:
        """The graph node that the pattern ends in."""
        node: fx.Node = self.bound[-1]
        return node

    @property
    def members(self) -> list[fx.Node]:
        """The graph nodes that belong to the match, in the pattern's dataflow order."""
        pairs = zip(self.candidate.pattern.nodes, self.bound, strict=True)
        inside = (value for part, value in pairs if part.kind not in ("any", "literal"))
        return list(dict.fromkeys(value for value in inside if isinstance(value, fx.Node)))


class Miss(NamedTuple):
    """Why a candidate does not fit at its anchor.

    ``why``: "another operator", "another value" (than where the node first stands), "other arguments",
    "used outside" or "reads itself"; ``value`` is what does not fit, at a position of the pattern.
    ``bound`` holds what fits so far, by position.
    """

    why: str
    position: int
    value: Any
    bound: dict[int, Any]


class Matcher:
    """Matches the patterns of an index against a graph. ``attempts`` counts trials of candidates.

    >>> import torch
    >>> from backquant.backend_config import BackendConfig, BackendPatternConfig
    >>> gm = fx.symbolic_trace(lambda x: torch.relu(x + 1))
    >>> backend = BackendConfig("b").set_backend_pattern_config(BackendPatternConfig(torch.relu))
    >>> found = Matcher(GraphIndex(gm), PatternIndex(backend)).run()
    >>> [match.anchor.name for match in found]
    ['relu']
    """

    def __init__(
        self,
        graph: GraphIndex,
        patterns: PatternIndex,
        accepts: Callable[[Found], bool] = lambda _: True,
    ) -> None:
        self._graph = graph
        self._patterns = patterns
        self._accepts = accepts
        self.attempts = 0

    def run(self, skip: Iterable[fx.Node] = ()) -> list[Found]:
        """All matches, in graph order of their anchors; nodes in ``skip`` take no part."""
        taken: set[fx.Node] = set(skip)
        found: list[Found] = []
        for node in reversed(self._graph.calls()):
            if node in taken:
                continue
            match = self._match_at(node, taken)
            if match is not None:
                taken.update(match.members)
                found.append(match)
        found.reverse()
        return found

    def _match_at(self, node: fx.Node, taken: set[fx.Node]) -> Found | None:
        key = self._graph.key(node)
        if key is None:
            return None
        for candidate in self._patterns.candidates(key):
            for swapped in _orders(candidate.pattern):
                self.attempts += 1
                found = self._trial(candidate, node, swapped)
                if isinstance(found, Miss) or not taken.isdisjoint(found.members):
                    continue
                if self._accepts(found):
                    return found
        return None

    def misses_at(self, node: fx.Node, candidate: Candidate) -> Iterator[Miss]:
        """Why a candidate does not fit at its anchor, for each order of arguments that is tried."""
        for swapped in _orders(candidate.pattern):
            found = self._trial(candidate, node, swapped)
            if isinstance(found, Miss):
                yield found

    def _trial(
        self, candidate: Candidate, anchor: fx.Node, swapped: frozenset[int]
    ) -> Found | Miss:
        """The operators at ``swapped`` positions have their two arguments the other way round."""
        pattern = candidate.pattern
        bound: dict[int, Any] = {}
        pending: list[tuple[int, Any]] = [(len(pattern.nodes) - 1, anchor)]
        while pending:
            position, value = pending.pop()
            if position in bound:
                if bound[position] is not value:
                    return Miss("another value", position, value, bound)
                continue
            part = pattern.nodes[position]
            if not self._fits(part, value):
                return Miss("another operator", position, value, bound)
            bound[position] = value
            if part.inputs is not None:
                arguments = self._arguments(value, len(part.inputs))
                if arguments is None:
                    return Miss("other arguments", position, value, bound)
                if position in swapped:
                    arguments = arguments[::-1]
                pending.extend(zip(part.inputs, arguments, strict=True))
        found = Found(candidate, tuple(bound[i] for i in range(len(pattern.nodes))))
        used = _used_outside(found)
        if used is not None:
            return Miss("used outside", -1, used, bound)
        itself = _reads_itself(found)
        return found if itself is None else Miss("reads itself", -1, itself, bound)

    def _fits(self, part: PatternNode, value: Any) -> bool:
        if part.kind == "any":
            return True
        if not isinstance(value, fx.Node):
            return part.kind in ("literal", "method") and _same_literal(value, part.op)
        return part.kind != "literal" and self._graph.key(value) == key_of(part)

    def _arguments(self, node: fx.Node, count: int) -> tuple[Any, ...] | None:
        if len(node.args) == count:
            return tuple(node.args)
        ordered = ordered_arguments(node, self._graph.module_of(node))
        return ordered if ordered is not None and len(ordered) == count else None


@lru_cache(maxsize=4096)
def _orders(pattern: NormalPattern) -> tuple[frozenset[int], ...]:
    """Sets of operators to swap the arguments of; none first. At most 64: see ``GraphPattern``."""
    free = [position for position, node in enumerate(pattern.nodes) if node.any_order]
    sizes = range(len(free) + 1)
    return tuple(frozenset(chosen) for size in sizes for chosen in combinations(free, size))


def _reads_itself(found: Found) -> fx.Node | None:
    """An operator of a graph pattern that one of its inputs is bound to."""
    if not isinstance(found.candidate.config.pattern, GraphPattern):
        return None
    members = found.members
    pairs = zip(found.candidate.pattern.nodes, found.bound, strict=True)
    return next((value for part, value in pairs if part.kind == "any" and value in members), None)


def _same_literal(value: Any, literal: Any) -> bool:
    return type(value) in (type(literal), bool, int, float) and bool(value == literal)


def _used_outside(found: Found) -> fx.Node | None:
    """A node inside the pattern that is used outside of it (rule 2)."""
    members = found.members
    for node in members:
        if node is found.anchor or len(node.users) == 1:
            continue
        if len(node.users) > len(members) or any(user not in members for user in node.users):
            return node
    return None


# The entries of a backend by the operator that their pattern ends in, in the order of trial.


@dataclass(frozen=True)
class Candidate:
    """An entry that may match; ``rank`` is its place in the order of trial."""

    rank: int
    entry: int  # index into BackendConfig.configs
    config: BackendPatternConfig
    pattern: NormalPattern


def key_of(node: PatternNode) -> OperatorKey | None:
    """The operator that a pattern node stands for; ``None`` for literals and ``MatchAllNode``.

    >>> import torch
    >>> from backquant.backend_config.pattern import normal_form
    >>> key_of(normal_form(torch.add).anchor) == OperatorKey("function", torch.add)
    True
    """
    if node.kind == "any" or node.kind == "literal":  # noqa: PLR1714  (narrows the type)
        return None
    return OperatorKey(node.kind, node.op)


class PatternIndex:
    """Candidates per anchor, so that matching costs nodes × candidates of that anchor.

    The order of trial is PyTorch's: longer patterns first, then those registered earlier.

    >>> import torch
    >>> backend = BackendConfig("b").set_backend_pattern_configs(
    ...     [BackendPatternConfig(torch.nn.ReLU),
    ...      BackendPatternConfig((torch.nn.Linear, torch.nn.ReLU))])
    >>> found = PatternIndex(backend).candidates(OperatorKey("module", torch.nn.ReLU))
    >>> [str(candidate.pattern) for candidate in found]
    ['torch.nn.ReLU(torch.nn.Linear)', 'torch.nn.ReLU']
    """

    @classmethod
    def of(
        cls, backend: BackendConfig, accepts: Callable[[BackendPatternConfig], bool] | None = None
    ) -> PatternIndex:
        """The candidates of ``backend`` that ``accepts`` takes, a function of a module; all without it."""
        return backend.derived((cls, accepts), lambda found: cls(found, accepts))

    def __init__(
        self,
        backend_config: BackendConfig,
        accepts: Callable[[BackendPatternConfig], bool] | None = None,
    ) -> None:
        entries = [
            (entry, config, pattern)
            for entry, (pattern, config) in enumerate(backend_config.shared_entries.items())
            if accepts is None or accepts(config)
        ]
        entries.sort(key=lambda item: -item[2].size)
        self._by_anchor: dict[OperatorKey, list[Candidate]] = {}
        self._anywhere: list[Candidate] = []
        self._parts: dict[OperatorKey, list[Candidate]] = {}
        for rank, (entry, config, pattern) in enumerate(entries):
            candidate = Candidate(rank, entry, config, pattern)
            key = key_of(pattern.anchor)
            if key is None:
                self._anywhere.append(candidate)
            else:
                self._by_anchor.setdefault(key, []).append(candidate)
            for node in pattern.nodes[:-1]:
                part = key_of(node)
                if part is not None:
                    self._parts.setdefault(part, []).append(candidate)

    def candidates(self, key: OperatorKey) -> list[Candidate]:
        """Entries whose pattern may end in this operator, in the order of trial."""
        own = self._by_anchor.get(key, [])
        if not self._anywhere:
            return own
        return sorted([*own, *self._anywhere], key=lambda candidate: candidate.rank)

    def containing(self, key: OperatorKey) -> list[Candidate]:
        """Entries of several operators that hold this one, in the order of trial."""
        longer = [c for c in self._by_anchor.get(key, []) if len(c.pattern.nodes) > 1]
        found = {c.rank: c for c in [*longer, *self._parts.get(key, [])]}
        return [found[rank] for rank in sorted(found)]

    @cached_property
    def alone(self) -> frozenset[Any]:
        """Every operator that is a pattern by itself."""
        found = self._by_anchor.items()
        return frozenset(key.op for key, of in found if any(len(c.pattern.nodes) == 1 for c in of))

    def anchors(self) -> list[OperatorKey]:
        """Every operator that a pattern ends in."""
        return list(self._by_anchor)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The readable names of ``anchors``, each once."""
        return tuple(dict.fromkeys(op_name(key.op) for key in self._by_anchor))
