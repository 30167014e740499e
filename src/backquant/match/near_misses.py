"""Why a longer pattern nearly matched: the candidate that got furthest, and where it stopped."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import fx

from backquant.backend_config import GraphPattern
from backquant.graph import GraphIndex
from backquant.match.index import Candidate, PatternIndex
from backquant.match.matcher import Matcher, Miss
from backquant.match.names import entry_text, op_name


class NearMisses:
    """The nearest miss of each node, found for all nodes at once when the first is asked for.

    >>> import torch
    >>> from backquant.backend_config import BackendConfig, BackendPatternConfig
    >>> swish = GraphPattern(["x"], {"gate": (torch.sigmoid, "x"), "out": (torch.mul, "x", "gate")},
    ...     name="swish")
    >>> backend = BackendConfig("b").set_backend_pattern_config(BackendPatternConfig(swish))
    >>> graph = GraphIndex(fx.symbolic_trace(lambda x, y: torch.mul(y, torch.sigmoid(x))))
    >>> print(NearMisses(graph, PatternIndex(backend)).text(graph.nodes["mul"]))
    for "swish", 'x' and 'y' would have to be one value
    """

    def __init__(self, graph: GraphIndex, patterns: PatternIndex) -> None:
        self._graph = graph
        self._patterns = patterns

    def text(self, node: fx.Node) -> str:
        """The entry whose pattern fitted the nodes around ``node`` best, and where it failed; empty if
        none did."""
        nearest = self._nearest.get(node)
        if nearest is None:
            return ""
        candidate, miss = nearest
        return f'for "{entry_text(candidate.config)}", {_text(candidate, miss)}'

    @cached_property
    def _nearest(self) -> dict[fx.Node, tuple[Candidate, Miss]]:
        matcher = Matcher(self._graph, self._patterns)
        found: dict[fx.Node, tuple[int, Candidate, Miss]] = {}
        for anchor in self._graph.calls():
            key = self._graph.key(anchor)
            for candidate in self._patterns.candidates(key) if key is not None else ():
                if len(candidate.pattern.nodes) == 1:
                    continue
                for miss in matcher.misses_at(anchor, candidate):
                    _keep_nearest(found, candidate, miss)
        return {node: (candidate, miss) for node, (_, candidate, miss) in found.items()}


def _keep_nearest(
    found: dict[fx.Node, tuple[int, Candidate, Miss]], candidate: Candidate, miss: Miss
) -> None:
    nodes = candidate.pattern.nodes
    operators = [
        value for i, value in miss.bound.items() if nodes[i].kind not in ("any", "literal")
    ]
    least = 1 if isinstance(candidate.config.pattern, GraphPattern) else 2
    if len(operators) < least:
        return
    for node in operators:
        if isinstance(node, fx.Node) and found.get(node, (0,))[0] < len(operators):
            found[node] = (len(operators), candidate, miss)


def _text(candidate: Candidate, miss: Miss) -> str:
    if miss.why == "used outside":
        inside = [value for value in miss.bound.values() if isinstance(value, fx.Node)]
        other = next(user for user in miss.value.users if user not in inside)
        return f"{miss.value.name!r} is also used outside of it, by {other.name!r}"
    if miss.why == "reads itself":
        return f"an input is its own operator {miss.value.name!r}"
    if miss.why == "other arguments":
        return f"{miss.value.name!r} is called with other arguments"
    if miss.why == "another value":
        first = miss.bound[miss.position]
        return f"{_value(first)} and {_value(miss.value)} would have to be one value"
    part = candidate.pattern.nodes[miss.position]
    expected = repr(part.op) if part.kind == "literal" else op_name(part.op)
    return f"{_value(miss.value)} stands where it has {expected}"


def _value(value: Any) -> str:
    return repr(value.name if isinstance(value, fx.Node) else value)
