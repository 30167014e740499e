"""Which observed values are needed quantized: those that a quantized operator reads, and results that no rule
leaves in float (``LeaveFloat``, ``results``).

In calibration every result is observed, and conversion leaves out what is not needed. In training what is not
needed is not rounded either, so that training computes what the converted model will.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from torch import fx

from backquant.backend_config import BackendConfig, LeaveFloat
from backquant.graph import GraphIndex
from backquant.match.plan import Plan
from backquant.match.recheck import float_results, only_moves
from backquant.prepare.sites import Site, SiteTable

__all__ = ["needed_names", "without_float_results"]


def needed_names(
    sites: Sequence[Site],
    quantized: Callable[[str], bool],
    moves: Callable[[str], bool],
    floats: Collection[str],
    given: Collection[str] = (),
) -> frozenset[str]:
    """Names of the sites that are needed. What only moves values to float operators then moves floats.

    Args:
        sites: in graph order.
        quantized, moves: whether the operator of this name is, and whether it only moves its one input.
        floats: operators whose results stay float where no quantized operator reads them.
        given: names of sites that are needed in any case.
    """
    needed, moving = set[str](), set[str]()
    for site in reversed(sites):
        made = site.producer if site.producer and quantized(site.producer) else ""
        is_read = any(quantized(reader) and reader not in moving for reader in site.readers)
        if is_read or (made and site.name in given):
            needed.add(site.name)
        elif made and floats and moves(made):
            moving.add(made)
        elif made and made not in floats:
            needed.add(site.name)
    return frozenset(needed)


def without_float_results(
    table: SiteTable,
    module: fx.GraphModule,
    plan: Plan,
    backend: BackendConfig,
    by_default: Iterable[LeaveFloat],
) -> SiteTable:
    """``table`` without the results that stay float by the backend's ``qdq``, or, where the model does not
    return them, ``by_default``."""
    graph = GraphIndex(module)
    always = float_results(
        plan, graph, backend, () if backend.qdq is None else backend.qdq.leave_float
    )
    floats = always | float_results(plan, graph, backend, by_default)
    if not floats:
        return table
    given = [s.name for s in table.sites if s.producer not in always and _is_returned(graph, s)]
    needed = needed_names(
        table.sites,
        lambda name: name in plan.decisions and plan.decisions[name].quantized,
        lambda name: only_moves(graph, graph.nodes[name]),
        floats,
        given,
    )
    kept = set(needed)
    for site in reversed(table.sites):  # an observer of another dtype stands behind the first
        if site.name in kept:
            kept.update((site.group, site.value))
    return SiteTable(tuple(site for site in table.sites if site.name in kept), table.refused)


def _is_returned(graph: GraphIndex, site: Site) -> bool:
    """Whether the model returns the value, maybe moved by operators that nothing observes."""
    pending = list(graph.nodes[site.value].users) if site.value in graph.nodes else []
    while pending:
        user = pending.pop()
        if user.op == "output":
            return True
        if only_moves(graph, user):
            pending += user.users
    return False
