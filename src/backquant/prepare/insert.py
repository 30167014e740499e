"""Insertion of observers: applies a site table to a copy of the graph; decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from backquant.backend_config import (
    BackendConfig,
    DTypeConfig,
    DTypeWithConstraints,
    LeaveFloat,
    get_module_to_qat_module,
)
from backquant.dtypes import dtype_name
from backquant.errors import ConfigError
from backquant.graph import (
    Breach,
    DeferredGraphModule,
    GraphEditor,
    call_before,
    contract,
    own_buffers,
    own_tensors,
    rebuilt,
    run_pass,
    set_module,
    verify,
)
from backquant.match.constraints import check_tensor
from backquant.match.plan import Decision, Match, MatchKind, Plan, Reason, TensorRequest
from backquant.match.refusal import Refusal
from backquant.observe import MinMaxObserver, ReuseInputObserver
from backquant.observe.protocol import is_fixed_qparams, is_placeholder
from backquant.prepare.placement import observation_sites
from backquant.prepare.record import (
    PreparedModule,
    Record,
    prepared_state,
    with_state,
)
from backquant.prepare.sites import (
    QUANTIZED_INPUT,
    ObserverSource,
    ObserverSpec,
    Role,
    Site,
    SiteTable,
    without_float_results,
)
from backquant.prepare.standalone import Interface, interfaces, observe_custom_modules
from backquant.qconfig import QConfigMapping
from backquant.reason_codes import ReasonCode

# What the insertion of observers requires and ensures.


def plan_is_of_this_graph(module: fx.GraphModule, record: Record, *_: object) -> Iterator[Breach]:
    """Each match of the plan is anchored at a node of the graph."""
    names = {node.name for node in module.graph.nodes}
    for match in record.plan.matches:
        if match.anchor not in names:
            yield Breach(match.anchor, f"a node of the graph, where the plan has {match.pattern}")


def values_are_observed(prepared: PreparedModule, *_: object) -> Iterator[Breach]:
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


# The graph of a prepared model as it was before its observers came.


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
    if any(site.shared for site in table.sites):
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
    if table.refused or any(match.kind is not MatchKind.PATTERN for match in plan.matches):
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
            module: Any = prepared.get_submodule(str(node.target))
            module.qconfig = source.qconfig(plan.decisions[node.name].rule)


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


# Inputs of a model that arrive quantized: what their integers stand for is measured, too.
#
# PyTorch's quantized tensors carry their qparams. A plain integer tensor does not, so each such input gets
# an observer here, ``quantized_input_0`` for input 0, …: in the ``"decomposed"`` dialect (and on integer
# kernels) the input is integers with the qparams that this observer measured, on calibration data in float.
# The other dialect does without it.


_UNSIGNED = (torch.quint8, torch.uint8)


class QuantizedInput(nn.Module):
    """Measures an input that arrives quantized, with the observer ``activation_post_process``."""

    def __init__(self, observer: nn.Module) -> None:
        super().__init__()
        self.activation_post_process = observer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``, measured."""
        out: torch.Tensor = self.activation_post_process(x)
        return out

    def __getattr__(self, name: str) -> Any:
        """What it lacks is the observer's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("activation_post_process"), name)


def observe_quantized_inputs(prepared: PreparedModule) -> PreparedModule:
    """Add the observers of quantized inputs to ``prepared``, in place; returns it.

    Raises ConfigError for an index that is no input.

    >>> from backquant.backend_config import BackendConfig
    >>> from backquant.match.plan import Plan
    >>> from backquant.prepare.insert import insert_observers
    >>> from backquant.qconfig import PrepareCustomConfig, QConfigMapping
    >>> custom = PrepareCustomConfig().set_input_quantized_indexes([0])
    >>> record = Record(Plan("b"), BackendConfig("b"), QConfigMapping(), custom)
    >>> prepared = insert_observers(fx.symbolic_trace(nn.ReLU()), record)
    >>> [node.name for node in observe_quantized_inputs(prepared).graph.nodes]
    ['input_1', 'quantized_input_0', 'relu', 'output']
    """
    state = prepared_state(prepared)
    indexes = () if state.custom is None else state.custom.input_quantized_indexes
    inputs = [node for node in prepared.graph.nodes if node.op == "placeholder"]
    editor = GraphEditor(prepared, state.provenance)
    sites: list[Site] = []
    for index in dict.fromkeys(indexes):
        if index >= len(inputs):
            raise ConfigError(
                f"input {index} is to arrive quantized, and the model has {len(inputs)} inputs",
                where="PrepareCustomConfig.set_input_quantized_indexes",
                fix=f"one of {', '.join(map(str, range(len(inputs))))}",
            )
        node = inputs[index]
        sites.append(_observed(editor, node, f"{QUANTIZED_INPUT}{index}", _observer(state, node)))
    if sites:
        editor.finish()
        verify(prepared, after="pass 'observe quantized inputs'")
        table = SiteTable((*sites, *state.sites.sites), state.sites.refused)
        with_state(prepared, replace(state, sites=table, provenance=editor.provenance))
    return prepared


def _observed(editor: GraphEditor, node: fx.Node, name: str, observer: nn.Module) -> Site:
    readers = tuple(user.name for user in node.users)
    device = next((tensor.device for tensor in editor.module.parameters()), None)
    module = QuantizedInput(observer).to(device).train(editor.module.training)
    editor.insert_module_after(node, name, module)
    return Site(
        name, node.name, Role.QUANTIZED_INPUT, ObserverSpec(None, "input"), readers, "", name
    )


def _observer(state: Record, node: fx.Node) -> nn.Module:
    """What the first quantized reader measures with, if that is of an unsigned dtype; else min/max."""
    source = ObserverSource(state.backend_config, state.qconfig_mapping)
    for user in node.users:
        decision = state.plan.decisions.get(user.name)
        if decision is None or not decision.quantized or decision.rule is None:
            continue
        made = source.make(ObserverSpec(decision.rule, "activation"))
        inner = getattr(made, "activation_post_process", None)
        observer = inner if isinstance(inner, nn.Module) else made
        measures = not (is_fixed_qparams(observer) or is_placeholder(observer))
        if measures and getattr(observer, "dtype", None) in _UNSIGNED:
            return observer
    return MinMaxObserver(dtype=torch.quint8)


# Training: modules whose weight is fake-quantized. A pass of its own, between plan and observers.


def swap_for_training(
    module: fx.GraphModule,
    plan: Plan,
    backend_config: BackendConfig,
    qconfig_mapping: QConfigMapping,
) -> fx.GraphModule:
    """A copy of ``module`` in which the weighted modules of quantized matches are the backend's QAT modules.

    All parameters and buffers of the copy are its own (tied ones stay tied), so that training does
    not reach the model that was captured. Each module is made by ``from_float`` and carries the
    QConfig of its rule as ``qconfig``. A module that is called several times is swapped once.

    Raises ConfigError for a QAT class without ``from_float``.

    >>> from backquant.graph import capture
    >>> gm = capture(nn.Sequential(nn.Linear(2, 2))).module
    >>> swapped = swap_for_training(gm, Plan("x86"), BackendConfig("x86"), QConfigMapping())
    >>> type(swapped.get_submodule("0")).__name__
    'Linear'
    """
    trained = rebuilt(DeferredGraphModule, module, own_tensors(module))
    source = ObserverSource(backend_config, qconfig_mapping)
    classes = get_module_to_qat_module(backend_config)
    nodes = {node.name: node for node in trained.graph.nodes}
    swapped: set[str] = set()
    for match, root in ((m, nodes[name]) for m in plan.matches for name in m.carriers):
        path = str(root.target)
        if match.kind is not MatchKind.PATTERN or root.op != "call_module" or path in swapped:
            continue
        decision = plan.decisions[root.name]
        float_module: Any = trained.get_submodule(path)
        qat_class = classes.get(type_before_parametrizations(float_module))
        qconfig = source.qconfig(decision.rule)
        if not decision.quantized or qat_class is None or qconfig is None:
            continue
        float_module.qconfig = qconfig
        set_module(trained, path, _made(qat_class, float_module, path))
        swapped.add(path)
    return trained


def _made(qat_class: type[nn.Module], float_module: nn.Module, path: str) -> nn.Module:
    from_float = getattr(qat_class, "from_float", None)
    where = f"BackendPatternConfig.set_qat_module({qat_class.__name__}), module {path!r}"
    fix = f"class {qat_class.__name__}:\n    @classmethod\n    def from_float(cls, module): ..."
    if not callable(from_float):
        raise ConfigError(
            f"the QAT module {qat_class.__name__} has no from_float", where=where, fix=fix
        )
    try:
        made: nn.Module = from_float(float_module)
    except ConfigError as error:
        raise ConfigError(
            error.what, where=f"module {path!r}: {error.where}", fix=error.fix
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{qat_class.__name__}.from_float raised {type(error).__name__}: {error}",
            where=where,
            fix=fix,
        ) from error
    return made.train(float_module.training)
