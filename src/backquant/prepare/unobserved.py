"""The graph of a prepared model as it was before its observers came."""

from __future__ import annotations

from torch import fx

from backquant.graph import DeferredGraphModule, own_buffers, rebuilt
from backquant.prepare.record import prepared_state


def unobserved(prepared: fx.GraphModule) -> fx.GraphModule:
    """A copy without observer nodes; names of the other nodes stay. It may be run and edited.

    Standalone modules in it are copies with observers of their own.

    >>> from torch import nn
    >>> from backquant.backend_config import BackendConfig
    >>> from backquant.match.plan import Plan
    >>> from backquant.prepare.insert import insert_observers
    >>> from backquant.prepare.record import Record
    >>> from backquant.qconfig import QConfigMapping
    >>> module = fx.symbolic_trace(nn.ReLU())
    >>> prepared = insert_observers(module, Record(Plan("b"), BackendConfig("b"), QConfigMapping()))
    >>> unobserved(prepared).code == module.code
    True
    """
    twin = rebuilt(DeferredGraphModule, prepared, own_buffers(prepared))
    nodes = {node.name: node for node in twin.graph.nodes}
    for site in reversed(prepared_state(prepared).sites.sites):
        observer = nodes[site.name]
        observer.replace_all_uses_with(observer.all_input_nodes[0])
        twin.graph.erase_node(observer)
    return twin
