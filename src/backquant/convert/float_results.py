"""Results that stay float where no quantized operator reads them (``LeaveFloat``, ``results``).

PyTorch quantizes the output of every quantized operator. Where a residual addition or an attention in
float reads it, that costs accuracy and a conversion, and saves nothing where the kernel gives floats, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import fx

from backquant.backend_config import LeaveFloat
from backquant.convert.state import Conversion
from backquant.graph import GraphIndex, OperatorKey
from backquant.match.index import key_of
from backquant.match.left_float import calls_one_of, keys_of
from backquant.operators.index import find
from backquant.prepare import Site

__all__ = ["Needed", "needed_sites"]


class Needed(NamedTuple):
    """Names of the sites that the final plan needs, and how many results stay float by default."""

    sites: frozenset[str]
    left_by_default: int


def needed_sites(work: Conversion, by_default: Iterable[LeaveFloat] = ()) -> Needed:
    """The sites that a quantized operator reads, or that are the output of one.

    An output that the rules of the backend's ``qdq``, or those ``by_default``, leave in float is not needed
    where no quantized operator reads it, unless the model gives it quantized. Where there are such outputs,
    what only moves values (``view``, ``transpose``) to float operators moves floats.
    """
    qdq = work.prepared.backend_config.qdq
    graph = GraphIndex(work.module)
    always = _anchors(work, graph, () if qdq is None else qdq.leave_float)
    floats = always | _anchors(work, graph, by_default)
    sites = work.prepared.sites.sites
    if not floats:
        return Needed(frozenset(site.name for site in sites if _is_used(work, site)), 0)
    given = _given_quantized(work)
    needed, moving, count = set[str](), set[str](), 0
    for site in reversed(sites):
        if any(work.quantized(reader) and reader not in moving for reader in site.readers):
            needed.add(site.name)
        elif not (site.producer and work.quantized(site.producer)):
            continue
        elif site.name in given:
            needed.add(site.name)
        elif _moves(graph, work.nodes[site.producer]):
            moving.add(site.producer)
        elif site.producer in floats:
            count += site.producer not in always
        else:
            needed.add(site.name)
    return Needed(frozenset(needed), count)


def _is_used(work: Conversion, site: Site) -> bool:
    by_reader = any(work.quantized(reader) for reader in site.readers)
    return by_reader or bool(site.producer and work.quantized(site.producer))


def _anchors(work: Conversion, graph: GraphIndex, rules: Iterable[LeaveFloat]) -> frozenset[str]:
    """Anchors of the matches whose results ``rules`` leave in float."""
    keys = keys_of(operator for rule in rules if rule.results for operator in rule.operators)
    if not keys:
        return frozenset()
    entries = work.prepared.backend_config.configs
    return frozenset(
        match.anchor
        for match in work.plan.matches
        if match.entry >= 0
        and (
            key_of(entries[match.entry].normal_pattern.nodes[0]) in keys
            or _is_fused(graph, work.nodes[match.nodes[0]], keys)
        )
    )


def _is_fused(graph: GraphIndex, node: fx.Node, keys: set[OperatorKey | None]) -> bool:
    """Whether a module is a fused or QAT form of one; not if a second activation enters it."""
    return len(node.args) + len(node.kwargs) == 1 and calls_one_of(graph, node, keys)


def _moves(graph: GraphIndex, node: fx.Node) -> bool:
    """Whether a node only moves the values of its one input."""
    key = graph.key(node)
    known = None if key is None else find(key.op)
    one = len(node.all_input_nodes) == 1 or node.op == "call_method"
    return known is not None and known.family == "shape" and known.shares_qparams and one


def _given_quantized(work: Conversion) -> frozenset[str]:
    """The observers that outputs are read through, if there are outputs that stay quantized."""
    custom = work.prepared.custom
    if custom is None or not custom.output_quantized_indexes:
        return frozenset()
    output = next(node for node in reversed(work.module.graph.nodes) if node.op == "output")
    return frozenset(node.name for node in output.all_input_nodes)
