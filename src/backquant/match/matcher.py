"""Patterns against a graph.

Rules (PyTorch's)

1. Nodes are visited in reverse order; the first candidate of the anchor that fits takes the node.
2. An operator inside a pattern is used by the pattern only. Its class, function or method name is
   compared exactly.
3. A pattern that lists arguments lists all of them. Positional arguments are compared as they
   stand; arguments given by keyword take their places first, ``inplace`` and defaults do not count.
4. Nodes that ``MatchAllNode`` stands for are inputs of the match and no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx

from backquant.backend_config.pattern import NormalPattern, PatternNode
from backquant.graph import GraphIndex
from backquant.graph.arguments import ordered_arguments
from backquant.match.index import Candidate, PatternIndex, key_of

__all__ = ["Found", "Matcher"]


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
            self.attempts += 1
            bound = self._bind(candidate.pattern, node)
            if bound is None:
                continue
            found = Found(candidate, bound)
            if taken.isdisjoint(found.members) and self._accepts(found):
                return found
        return None

    def _bind(self, pattern: NormalPattern, anchor: fx.Node) -> tuple[Any, ...] | None:
        """The value for each node of the pattern, or ``None`` when it does not fit."""
        bound: dict[int, Any] = {}
        pending: list[tuple[int, Any]] = [(len(pattern.nodes) - 1, anchor)]
        while pending:
            position, value = pending.pop()
            if position in bound:
                if bound[position] is not value:
                    return None
                continue
            part = pattern.nodes[position]
            if not self._fits(part, value):
                return None
            bound[position] = value
            if part.inputs is not None:
                arguments = self._arguments(value, len(part.inputs))
                if arguments is None:
                    return None
                pending.extend(zip(part.inputs, arguments, strict=True))
        values = tuple(bound[position] for position in range(len(pattern.nodes)))
        return values if _is_closed(pattern, values) else None

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


def _same_literal(value: Any, literal: Any) -> bool:
    return type(value) in (type(literal), bool, int, float) and bool(value == literal)


def _is_closed(pattern: NormalPattern, values: tuple[Any, ...]) -> bool:
    """Whether no node inside the pattern is used outside of it (rule 2)."""
    inside = {
        value
        for part, value in zip(pattern.nodes, values, strict=True)
        if part.kind not in ("any", "literal") and isinstance(value, fx.Node)
    }
    inner = inside - {values[-1]}
    return all(len(node.users) <= 1 or set(node.users) <= inside for node in inner)
