"""Observer placement by PyTorch's rules where ours differ on purpose, to tell what a difference is.

`TorchPlacement` is our placement with the rules of ``backquant.prepare.sites`` that are marked
*different* turned back into PyTorch's. Each time a rule decides otherwise than ours would, its name
goes to ``causes``. A model on which ours differs from PyTorch's has to be equal under these rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from backquant.match.plan import Match
from backquant.prepare.placement import Groups, Placement
from backquant.prepare.sites import ObserverSpec, Probe, Site, SiteTable

__all__ = [
    "ADOPTED",
    "FAILS",
    "FIXED_ARITHMETIC",
    "FIXED_ENTRY",
    "FIXED_INPUT",
    "SPLIT",
    "IN_PLACE",
    "UNOBSERVED",
    "TorchPlacement",
]

FIXED_INPUT = "input of an operator with fixed qparams gets its output's"
FIXED_ENTRY = "fixed qparams spread to the other entries of a cat"
FIXED_ARITHMETIC = "arithmetic on a fixed range is clipped to it"
SPLIT = "observers that must be one are replaced one by one"
ADOPTED = "nothing to share: an observer further up is adopted, or none placed"
FAILS = (
    "prepare fails: a later entry of a cat leads up to a cat without an observer, or to a number"
)
# tests/graph/test_in_place.py shows the change that is lost
IN_PLACE = "a value is read as it was before an operator in place changed it"
UNOBSERVED = "a value without an observer counts as quantized"


class _OneByOne(Groups):
    """Sharing as PyTorch does it: one site's observer is replaced, the rest of its group is not."""

    def __init__(self) -> None:
        super().__init__()
        self._head: dict[str, str] = {}
        self.whole = Groups()

    def find(self, name: str) -> str:
        return self._head.get(name, name)

    def unite(self, first: str, second: str) -> None:
        self._head[second] = self.find(first)
        self.whole.unite(first, second)

    def is_whole(self, names: list[str]) -> bool:
        """Whether the sites that share are those that share when groups are joined as a whole."""
        pairs = {(self.find(name), self.whole.find(name)) for name in names}
        return len({one for one, _ in pairs}) == len(pairs) == len({two for _, two in pairs})


class TorchPlacement(Placement):
    """Our placement under PyTorch's rules; ``causes`` has the rules that made a difference."""

    causes: set[str]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.causes = set()
        self._groups = _OneByOne()
        self._match_of = {name: match for match in self._matches for name in match.nodes}
        self._placed: dict[str, Match] = {}

    def run(self) -> SiteTable:
        table = super().run()
        if not self._groups.is_whole(list(self._drafts)):
            self.causes.add(SPLIT)
        return SiteTable(tuple(self._named_by_first(table)), table.refused)

    def _named_by_first(self, table: SiteTable) -> Iterator[Site]:
        """Groups by the first of their sites: the one whose observer they use may have another now."""
        first: dict[str, str] = {}
        for site in table.sites:
            name = first.setdefault(site.group, site.name)
            spec = self._drafts[site.group].spec if name == site.name else site.spec
            yield replace(site, group=name, spec=spec)

    # -- rule 2: a value has the dtype that its producer asked for, observed or not ------------------

    def _needs(self, value: str, wanted: Probe, zeroth: bool) -> bool:
        ours = super()._needs(value, wanted, zeroth)
        match = self._match_of.get(value)
        if value in self._drafts or match is None or self._value_dtype(value) is None:
            return ours
        asked = self._source.probe(ObserverSpec(self._rule(match), "activation"))
        assumed = {**self._dtype, value: asked.dtype or torch.float32}
        own, self._dtype = self._dtype, assumed
        theirs = super()._needs(value, wanted, zeroth)
        self._dtype = own
        if theirs != ours:
            self.causes.add(UNOBSERVED)
        return theirs

    # -- rule 6: the next observer up the graph is shared, whatever is between -----------------------

    def _partners(self, anchor: fx.Node, match: Match) -> list[str] | None:
        ours = super()._partners(anchor, match)
        theirs = self._adopted(anchor)
        if theirs != ours:
            self.causes.add(ADOPTED)
        return theirs

    def _adopted(self, anchor: fx.Node) -> list[str] | None:
        kinds = (fx.Node, list, tuple)
        first = next((value for value in anchor.args if isinstance(value, kinds)), None)
        entries = list(first) if isinstance(first, (list, tuple)) else [first]
        sites = [self._above(anchor, entry, first_only=i > 0) for i, entry in enumerate(entries)]
        return None if None in sites else sites

    def _above(self, reader: fx.Node, value: Any, *, first_only: bool) -> str | None:
        while isinstance(value, fx.Node):
            site = self._read.get((reader.name, value.name)) or self._current.get(value.name)
            if site is not None:
                return site
            nodes = value.args[:1] if first_only else value.args
            if first_only and nodes and not isinstance(nodes[0], fx.Node):
                self.causes.add(FAILS)
            above = next((item for item in nodes if isinstance(item, fx.Node)), None)
            reader, value = value, above
        return None

    def _refuse(self, match: Match) -> None:
        """The observer is dropped; the operator still counts as quantized."""
        self.causes.add(ADOPTED)

    # -- rule 7: fixed qparams go wherever sharing takes them ----------------------------------------

    def _measuring(self, spec: ObserverSpec) -> ObserverSpec:
        self.causes.add(FIXED_INPUT)
        return spec

    def _separate_from_fixed(self, anchor: fx.Node, match: Match, partners: list[str]) -> list[str]:
        heads = {self._groups.find(name) for name in partners}
        fixed = {head for head in heads if self._source.probe(self._drafts[head].spec).fixed}
        if fixed and len(heads) > 1:
            self.causes.add(FIXED_ENTRY)
        return partners

    def _is_arithmetic(self, match: Match) -> bool:
        if super()._is_arithmetic(match):
            self.causes.add(FIXED_ARITHMETIC)
        return False
