"""A partition of a program for XNNPACK whose parts can each be lowered as a unit, and loaded.

1. ExecuTorch 1.5 merges two parts as long as no value leaves the merged part and comes back into it. Its test
   misses two parts that each read a result of the other: neither can run first. Where that happens, the
   operators that XNNPACK takes are grouped anew, by level. The level of an operator is the largest number of
   times that a value, on its way from the inputs, has gone from XNNPACK to an operator outside of it. What
   leaves a level is read back at a higher level only, so that the levels have an order.
2. It takes operators on more axes than XNNPACK's tensors have (views of eight cut a video into windows), and
   the delegate does not load: these stay outside.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

import torch
from torch import fx

__all__ = ["by_levels", "can_be_cut_out", "has_axes_for", "partitioner"]


#: Of XNNPACK's tensors.
_MOST_AXES = 6


def partitioner() -> Any:
    """ExecuTorch's partitioner for XNNPACK, with partitions that have an order."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from torch.fx.passes.infra.partitioner import Partition

    class Partitioner(XnnpackPartitioner):
        def generate_partitions(self, ep: Any) -> list[Any]:
            proposed: list[Any] = super().generate_partitions(ep)
            if can_be_cut_out(ep.graph, [part.nodes for part in proposed]):
                return proposed
            levels = by_levels(ep.graph, self.get_matched_nodes_from_configs(ep))
            return [Partition(id=i, nodes=nodes) for i, nodes in enumerate(levels)]

        def get_matched_nodes_from_configs(self, ep: Any) -> list[Any]:
            found: list[Any] = super().get_matched_nodes_from_configs(ep)
            return [nodes for nodes in found if all(map(has_axes_for, nodes))]

    return Partitioner()


def has_axes_for(node: fx.Node) -> bool:
    """Whether XNNPACK has tensors of as many axes as ``node`` reads and gives.

    >>> program = torch.export.export(torch.nn.ReLU(), (torch.ones([1] * 7),))
    >>> [has_axes_for(node) for node in program.graph.find_nodes(op="placeholder")]
    [False]
    """
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    return all(v.dim() <= _MOST_AXES for v in values if isinstance(v, torch.Tensor))


def can_be_cut_out(graph: fx.Graph, parts: Iterable[Collection[fx.Node]]) -> bool:
    """Whether the graph has an order in which each part runs as one operator.

    >>> gm = fx.symbolic_trace(lambda x: (x + 1, (x + 1).exp() * 2))
    >>> one, other, exp, product = [n for n in gm.graph.nodes if n.op == "call_function" or n.target == "exp"]
    >>> can_be_cut_out(gm.graph, [[one, other], [product]]), can_be_cut_out(gm.graph, [[other, product]])
    (True, False)
    """
    try:
        _ordered(_sources(graph, _of_node(parts)))
    except CycleError:
        return False
    return True


def by_levels(graph: fx.Graph, groups: Sequence[Collection[fx.Node]]) -> list[list[fx.Node]]:
    """The nodes of each level, in graph order; the nodes of one group stay together.

    Raises ``CycleError`` where single groups have no order.
    """
    of_node = _of_node(groups)
    sources = _sources(graph, of_node)
    levels: dict[Any, int] = {}
    for part in _ordered(sources):
        outside = isinstance(part, fx.Node)
        before = sources.get(part, ())
        steps = (levels[each] + (outside and not isinstance(each, fx.Node)) for each in before)
        levels[part] = max(steps, default=0)
    found: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node in of_node:
            found[levels[of_node[node]]].append(node)
    return [found[level] for level in sorted(found)]


def _of_node(parts: Iterable[Collection[fx.Node]]) -> dict[fx.Node, int]:
    return {node: i for i, part in enumerate(parts) for node in part}


def _sources(graph: fx.Graph, of_node: Mapping[fx.Node, int]) -> dict[Any, set[Any]]:
    """What each part, and each node outside of parts, reads. Constants are copied for each part."""
    sources: dict[Any, set[Any]] = defaultdict(set)
    for node in graph.nodes:
        own = of_node.get(node, node)
        read = (of_node.get(s, s) for s in node.all_input_nodes if s.op != "placeholder")
        sources[own].update(each for each in read if each != own)
    return sources


def _ordered(sources: Mapping[Any, set[Any]]) -> list[Any]:
    return list(TopologicalSorter(sources).static_order())
