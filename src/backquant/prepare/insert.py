"""Insertion of observers: applies a site table to a copy of the graph; decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

import torch
from torch import fx, nn

from backquant.backend_config import LeaveFloat
from backquant.errors import ConfigError
from backquant.graph import (
    GraphEditor,
    call_before,
    contract,
    own_buffers,
    rebuilt,
    run_pass,
    set_module,
    verify,
)
from backquant.match.plan import Match, MatchKind, Plan, Reason
from backquant.prepare.conflicts import check_groups
from backquant.prepare.contracts import plan_is_of_this_graph, values_are_observed
from backquant.prepare.custom_modules import observe_custom_modules
from backquant.prepare.needed import without_float_results
from backquant.prepare.placement import observation_sites
from backquant.prepare.record import (
    PreparedModule,
    Record,
    with_state,
)
from backquant.prepare.requests import ObserverSource
from backquant.prepare.separate_interfaces import Interface, interfaces
from backquant.prepare.sites import Site, SiteTable
from backquant.reason_codes import ReasonCode


def insert_observers(
    module: fx.GraphModule, record: Record, results: tuple[LeaveFloat, ...] | None = None
) -> PreparedModule:
    """A copy of ``module`` with the observers that the plan of ``record`` needs, ready for calibration.

    ``results``: for training, rules by default for results; what stays float in the converted model is not
    rounded. ``None``: every result is observed.

    Parameters are shared with ``module``, buffers are not: running the result changes nothing
    outside of it. Names, order and sharing of the observers are those of PyTorch's ``prepare_fx``
    except as ``backquant.prepare.sites`` says. State: ``prepared_state(result)``.

    Raises ConfigError for a QConfig that makes no observer, for values that share an observer and
    cannot (``backquant.prepare.conflicts``), and for a model on several devices.

    >>> from backquant.backend_config import BackendConfig
    >>> from backquant.graph import capture
    >>> from backquant.qconfig import QConfigMapping
    >>> module = capture(nn.Sequential(nn.Linear(2, 2))).module
    >>> prepared = insert_observers(
    ...     module, Record(Plan("x86"), BackendConfig("x86"), QConfigMapping()))
    >>> [node.name for node in prepared.graph.nodes]
    ['input_1', '_0', 'output']
    """
    return run_pass(_insert_observers, module, record, results)


@contract(requires=[plan_is_of_this_graph], ensures=[values_are_observed])
def _insert_observers(
    module: fx.GraphModule, record: Record, results: tuple[LeaveFloat, ...] | None
) -> PreparedModule:
    plan, backend, custom = record.plan, record.backend_config, record.custom
    table = observation_sites(module, plan, backend, record.qconfig_mapping, custom)
    if results is not None:
        table = without_float_results(table, module, plan, backend, results)
    source = ObserverSource(backend, record.qconfig_mapping)
    check_groups(table, plan, backend, source)
    prepared = rebuilt(PreparedModule, module, own_buffers(module))
    editor = GraphEditor(prepared, record.provenance.copy())
    _install(prepared, table, source)
    _connect(editor, table)
    _give_qconfigs(prepared, plan, source)
    if custom is not None and custom.float_to_observed_mapping:
        observe_custom_modules(prepared, plan, record.qconfig_mapping, custom)
    editor.finish()
    verify(prepared, after="pass 'insert observers'")
    plan = _without_refused(plan, table, interfaces(module, plan, custom))
    state = replace(record, plan=plan, sites=table, provenance=editor.provenance)
    with_state(prepared, state)
    return prepared


def _without_refused(plan: Plan, table: SiteTable, separate: Mapping[str, Interface]) -> Plan:
    reasons = {reason.node: reason for reason in table.refused}
    for match in plan.matches:
        asked = match.kind is not MatchKind.PATTERN and plan.decisions[match.anchor].quantized
        if asked and match.anchor not in separate:
            reasons[match.anchor] = _not_prepared(match)
    return plan.refuse(reasons.values())


_CODES = {
    MatchKind.STANDALONE: ReasonCode.STANDALONE,
    MatchKind.CUSTOM_MODULE: ReasonCode.OBSERVED_CUSTOM,
}


def _not_prepared(match: Match) -> Reason:
    return Reason(
        node=match.anchor,
        rule=_CODES[match.kind],
        asked=f"{match.pattern} as a {match.kind.value.replace('_', ' ')} of its own",
        admitted="a module that was prepared before its parent, and the PrepareCustomConfig",
        fix="prepare_standalone_modules(...), then insert_observers(module, replace(record, custom=custom))",
    )


def _install(prepared: PreparedModule, table: SiteTable, source: ObserverSource) -> None:
    device = _only_device(prepared) if table.sites else None
    made: dict[str, nn.Module] = {}
    for site in table.sites:
        if not site.shared:
            observer = source.make(site.spec)
            if observer.training != prepared.training or observer._modules:
                observer.train(prepared.training)
            own = {tensor.device for tensor in chain(observer.parameters(), observer.buffers())}
            elsewhere = device is not None and own != {device}
            made[site.name] = observer.to(device) if elsewhere else observer
    for site in table.sites:
        set_module(prepared, site.name, made[site.group])


def _give_qconfigs(prepared: PreparedModule, plan: Plan, source: ObserverSource) -> None:
    """Set ``module.qconfig`` of the modules that the graph calls: the QConfig of their rule, or None."""
    for node in prepared.graph.nodes:
        if node.op == "call_module" and node.name in plan.decisions:
            module = prepared.get_submodule(str(node.target))
            module.qconfig = source.qconfig(plan.decisions[node.name].rule)  # type: ignore[assignment]


def _connect(editor: GraphEditor, table: SiteTable) -> None:
    nodes = {node.name: node for node in editor.graph.nodes}
    for site in table.sites:
        value = nodes[site.value]
        observed = call_before(value.next, "call_module", site.name, (value,), site.name)
        nodes[site.name] = observed
        editor.provenance.record(site.name, (site.value,))
        for reader in _rewired(site, value, observed, nodes):
            reader.replace_input_with(value, observed)


def _rewired(
    site: Site, value: fx.Node, observed: fx.Node, nodes: dict[str, fx.Node]
) -> list[fx.Node]:
    """Whose argument becomes the observed value: all users of an output, else the readers."""
    if site.producer:
        return [user for user in value.users if user is not observed]
    return [nodes[name] for name in site.readers]


def _only_device(module: nn.Module) -> torch.device | None:
    devices = {tensor.device for tensor in chain(module.parameters(), module.buffers())}
    if len(devices) > 1:
        raise ConfigError(
            "the model is on several devices, observers are placed on one",
            where=", ".join(sorted(map(str, devices))),
            fix="model.to('cpu')",
        )
    return next(iter(devices), None)
