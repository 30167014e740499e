"""The entries of a backend by the operator that their pattern ends in, in the order of trial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from backquant.backend_config import BackendConfig, BackendPatternConfig
from backquant.backend_config.pattern import NormalPattern, PatternNode
from backquant.graph import OperatorKey


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

    def __init__(
        self,
        backend_config: BackendConfig,
        accepts: Callable[[BackendPatternConfig], bool] = lambda _: True,
    ) -> None:
        entries = [
            (entry, config, pattern)
            for entry, (pattern, config) in enumerate(backend_config.entries.items())
            if accepts(config)
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
