"""Results that stay float where no quantized operator reads them (``LeaveFloat``, ``results``).

PyTorch quantizes the output of every quantized operator. Where a residual addition or an attention in
float reads it, that costs accuracy and a conversion, and saves nothing where the kernel gives floats, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from backquant.backend_config import LeaveFloat
from backquant.convert.state import Conversion
from backquant.graph import GraphIndex
from backquant.match.recheck import float_results, only_moves
from backquant.prepare import needed_names


class Needed(NamedTuple):
    """Names of the sites that the final plan needs, and how many results stay float by default."""

    sites: frozenset[str]
    left_by_default: int


def needed_sites(work: Conversion, by_default: Iterable[LeaveFloat] = ()) -> Needed:
    """The sites that a quantized operator reads, or that are the output of one.

    Not needed are outputs that rules leave in float (of the backend's ``qdq``, or ``by_default``) and
    that no quantized operator reads, unless the model returns them quantized. Operators behind them that
    only move values (``view``, ``transpose``) to float operators then move floats.
    """
    qdq = work.prepared.backend_config.qdq
    graph, config = GraphIndex(work.module), work.prepared.backend_config
    always = float_results(work.plan, graph, config, () if qdq is None else qdq.leave_float)
    floats = always | float_results(work.plan, graph, config, by_default)
    sites = work.prepared.sites.sites
    needed = needed_names(
        sites,
        work.quantized,
        lambda name: only_moves(graph, work.nodes[name]),
        floats,
        _given_quantized(work),
    )
    left = (site for site in sites if site.name not in needed and work.quantized(site.producer))
    return Needed(needed, sum(site.producer in floats - always for site in left))


def _given_quantized(work: Conversion) -> frozenset[str]:
    """The observers that outputs are read through, if there are outputs that stay quantized."""
    custom = work.prepared.custom
    if custom is None or not custom.output_quantized_indexes:
        return frozenset()
    output = next(node for node in reversed(work.module.graph.nodes) if node.op == "output")
    return frozenset(node.name for node in output.all_input_nodes)
