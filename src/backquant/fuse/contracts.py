"""What fusion returns, and what is true of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import fx

from backquant.graph import Breach, Provenance, Scope
from backquant.match.plan import Fusion


class Fused(NamedTuple):
    """A graph with fused modules.

    ``scopes`` keeps the entries of nodes that were fused away, for rules that name their modules.
    """

    module: fx.GraphModule
    scopes: dict[str, Scope]
    provenance: Provenance


def patterns_are_fused(
    fused: Fused,
    module: fx.GraphModule,
    scopes: Mapping[str, Scope],
    fusions: Sequence[Fusion],
    *_: object,
) -> Iterator[Breach]:
    """Of each planned pattern the root is left, which calls the fused module; its other nodes are gone."""
    left = {node.name: node for node in fused.module.graph.nodes}
    for fusion in fusions:
        root = left.get(fusion.root)
        if root is None or root.op != "call_module":
            yield Breach(fusion.root, f"a call of the fused module of {fusion.pattern}")
        for name in fusion.nodes:
            if name in left and name != fusion.root:
                yield Breach(name, f"to be fused into {fusion.root}, by {fusion.pattern}")
