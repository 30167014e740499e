"""Insertion of observers: applies a site table to a copy of the graph; decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain

import torch
from torch import fx, nn

from backquant.backend_config import BackendConfig, DTypeConfig, DTypeWithConstraints, LeaveFloat
from backquant.dtypes import dtype_name
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
from backquant.match.constraints import check_tensor
from backquant.match.plan import Decision, Match, MatchKind, Plan, Reason, TensorRequest
from backquant.match.refusal import Refusal
from backquant.observe import ReuseInputObserver
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
from backquant.prepare.roles import Role
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
    cannot (``backquant.prepare.insert``), and for a model on several devices.

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


# Checks that one observer suits all values that share it.
#
# The observer is that of the first site of the group (its head). Its dtype has to be the one that every
# member asks for, and the backend's entries for the members' operators have to admit it. *Different:*
# PyTorch puts the first observer everywhere, whatever that violates.


def check_groups(
    table: SiteTable, plan: Plan, backend_config: BackendConfig, source: ObserverSource
) -> None:
    """Raise ConfigError, naming entry and node, for a member that the head's observer does not suit."""
    _Check(table, plan, backend_config, source).run()


class _Check:
    """The lookups that the members share."""

    def __init__(
        self, table: SiteTable, plan: Plan, backend: BackendConfig, source: ObserverSource
    ) -> None:
        self._table, self._plan, self._source = table, plan, source
        self._name = backend.name or "the backend"
        self._entries = backend.shared_configs
        self._roots = {name: match.anchor for match in plan.matches for name in match.readers}

    def run(self) -> None:
        for head, members in self._table.groups().items():
            for name in members:
                if name != head:
                    self._check(self._table[head], self._table[name])

    def _check(self, head: Site, member: Site) -> None:
        given, asked = self._source.probe(head.spec), self._source.probe(member.spec)
        if given.dtype != asked.dtype and not asked.reuses_input:
            text = f"{dtype_name(given.dtype)}, and {dtype_name(asked.dtype)} is requested"
            node = member.producer or member.readers[0]
            raise self._conflict(head, member, text, self._roots.get(node, node))
        request = self._request(head)
        if request is None or head.spec.part not in ("activation", "output"):
            return
        for anchor, refusal in self._refusals(request, member):
            text = f"{refusal.asked}, and {refusal.admitted} is supported"
            raise self._conflict(head, member, text, anchor)

    def _request(self, head: Site) -> TensorRequest | None:
        """What the head's observer was asked to be, from the decision that it was made for."""
        decision = self._decision(head)
        if decision is None:
            return None
        return decision.asked_output if head.spec.part == "output" else decision.asked_activation

    def _decision(self, site: Site) -> Decision | None:
        node = site.producer or (site.readers[0] if site.readers else "")
        return self._plan.decisions.get(self._roots.get(node, node))

    def _refusals(self, request: TensorRequest, member: Site) -> Iterator[tuple[str, Refusal]]:
        """What the entries of the member's producer and readers do not admit, with their anchors.

        The fixed qparams of an entry are those of its output: what it reads is measured.
        """
        if member.role is Role.OUTPUT:
            admitted = [c.output_dtype_with_constraints for c in self._configs(member.producer)]
            for refusal in _refused_by_all(request, admitted):
                yield member.producer, refusal
        for reader in member.readers if member.role in (Role.INPUT, Role.OUTPUT) else ():
            anchor = self._roots.get(reader, reader)
            admitted = [c.input_dtype_with_constraints for c in self._configs(anchor)]
            for refusal in _refused_by_all(request, admitted):
                if refusal.rule != ReasonCode.FIXED_QPARAMS:
                    yield anchor, refusal

    def _configs(self, anchor: str) -> list[DTypeConfig]:
        """The dtype configs that may apply at ``anchor``: the chosen one, or all if the output takes its
        input's dtype."""
        decision = self._plan.decisions.get(anchor)
        if decision is None or decision.dtype_config is None or decision.match is None:
            return []
        match = self._plan.matches[decision.match]
        if match.kind is not MatchKind.PATTERN or not decision.quantized:
            return []
        configs = self._entries[match.entry].dtype_configs
        request = decision.asked_activation
        if request is not None and request.observer == ReuseInputObserver.__name__:
            return configs
        return [configs[decision.dtype_config]]

    def _conflict(self, head: Site, member: Site, why: str, anchor: str) -> ConfigError:
        decision = self._plan.decisions.get(anchor)
        entry = ""
        if decision is not None and decision.match is not None:
            match = self._plan.matches[decision.match]
            entry = f"{self._name}, entry {match.entry} ({match.pattern}), "
        return ConfigError(
            f"values that share one observer cannot agree: that of {head.value!r} gives {why} "
            f"for {member.value!r}",
            where=f"{entry}node {anchor!r}",
            fix="the same activation in the QConfigs of both, or None for one of them",
        )


def _refused_by_all(request: TensorRequest, admitted: list[DTypeWithConstraints]) -> list[Refusal]:
    """The refusals of the first, if none of ``admitted`` takes what is asked."""
    refusals = [list(check_tensor(request, constraints)) for constraints in admitted]
    return refusals[0] if refusals and all(refusals) else []
