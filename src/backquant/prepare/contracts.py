"""What the insertion of observers requires and ensures."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from backquant.graph import Breach
from backquant.prepare.record import PreparedModule, Record, prepared_state


def plan_is_of_this_graph(
    module: fx.GraphModule, record: Record, *others: object
) -> Iterator[Breach]:
    """Each match of the plan is anchored at a node of the graph."""
    names = {node.name for node in module.graph.nodes}
    for match in record.plan.matches:
        if match.anchor not in names:
            yield Breach(match.anchor, f"a node of the graph, where the plan has {match.pattern}")


def values_are_observed(
    prepared: PreparedModule, module: fx.GraphModule, record: Record, *others: object
) -> Iterator[Breach]:
    """Each site of the record has its observer, which is called on its value and read by its readers."""
    nodes = {node.name: node for node in prepared.graph.nodes}
    sites = prepared_state(prepared).sites.sites
    again = {(site.value, reader) for site in sites for reader in site.readers}
    read = {(given.name, node.name) for node in nodes.values() for given in node.all_input_nodes}
    for site in sites:
        call = nodes.get(site.name)
        if call is None or call.op != "call_module" or site.name not in prepared._modules:
            yield Breach(site.name, f"a call of the observer of {site.value}")
            continue
        if [source.name for source in call.all_input_nodes] != [site.value]:
            yield Breach(site.name, f"to observe {site.value}")
        for reader in site.readers:
            direct = (site.name, reader) in read
            if not direct and (site.name, reader) not in again:  # not an observer of an observer
                yield Breach(reader, f"to read {site.value} through its observer {site.name}")
