"""Which observers of a prepared model need data before it can be converted.

1. Observers that measure at each call, hold a dtype only, or have fixed qparams need none.
2. A weight that depends on no input is measured at conversion.
3. Observers that saw data already need no more.
"""

from __future__ import annotations

from torch import fx

from backquant.calibrate.feed import UnseenObserver
from backquant.calibrate.observers import saw_data
from backquant.observe import is_placeholder
from backquant.prepare import Role, prepared_state

__all__ = ["waiting_for_data"]


def waiting_for_data(prepared: fx.GraphModule) -> tuple[UnseenObserver, ...]:
    """The observers that calibration has to feed, in graph order; none if there is nothing to measure.

    Raises UsageError when the model is not prepared.

    >>> import torch
    >>> from torch import nn
    >>> from backquant.backend_config import BackendConfig
    >>> from backquant.match.plan import Plan
    >>> from backquant.prepare import insert_observers
    >>> from backquant.qconfig import QConfigMapping
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    >>> prepared = insert_observers(gm, Plan("x86"), BackendConfig("x86"), QConfigMapping())
    >>> waiting_for_data(prepared)
    ()
    """
    sites = prepared_state(prepared).sites
    nodes = _from_inputs(prepared.graph)
    needed = {
        site.group
        for site in sites.sites
        if site.role is not Role.WEIGHT or site.name in nodes
    }
    waiting = []
    for head in sites.groups():
        observer = prepared.get_submodule(head)
        dynamic = getattr(observer, "is_dynamic", False) or is_placeholder(observer)
        if head in needed and not dynamic and not saw_data(observer):
            waiting.append(UnseenObserver(head, sites[head].value))
    return tuple(waiting)


def _from_inputs(graph: fx.Graph) -> set[str]:
    """The names of all nodes whose value depends on an input."""
    reached: set[str] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(n.name in reached for n in node.all_input_nodes):
            reached.add(node.name)
    return reached
