"""What fusion ensures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import fx

from backquant.graph import Breach, Scope
from backquant.match.plan import Fusion

if TYPE_CHECKING:
    from backquant.fuse.apply import Fused


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
