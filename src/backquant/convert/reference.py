"""From a calibrated model to the reference model: every quantized value as quantize/dequantize."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import fx, nn

from backquant.backend_config import BackendConfig, LeaveFloat
from backquant.convert.contracts import (
    groups_are_measured,
    observers_are_called,
    record_is_complete,
    standalone_are_converted,
)
from backquant.convert.custom_modules import (
    CustomSwap,
    convert_custom_modules,
    custom_swaps,
    fuse_outputs,
)
from backquant.convert.dialects import DIALECTS, is_dequantize
from backquant.convert.fold import fold_after_training
from backquant.convert.hardware import (
    described_hardware,
    hardware_scales,
    round_biases,
    round_results,
)
from backquant.convert.interface import (
    dequantize_inputs,
    insert_dequantize,
    keep_outputs_quantized,
    measured_outputs,
    plain_qparams,
)
from backquant.convert.scales import (
    convert_activations,
    measured_scales,
    qparams_keys,
    ratio_units,
    weight_floors,
)
from backquant.convert.state import Conversion, ConvertRequest, ReferenceModel, reference_state
from backquant.convert.weights import (
    convert_functional_weights,
    convert_weighted_modules,
    measure_functional_weights,
    without_training,
)
from backquant.dtypes import ObservedQParams, QParams
from backquant.errors import BackquantError, ConfigError, UsageError
from backquant.graph import (
    GraphEditor,
    GraphIndex,
    GraphRewriter,
    contract,
    free_path,
    get_module,
    inline_custom_gradients,
    preserve,
    rebuilt,
    remove_unused_modules,
    run_pass,
    set_module,
    settle_mode_values,
    shallow_copy,
    verify,
)
from backquant.graph.shapes import GraphValues
from backquant.match import CustomMatching, Match, MatchKind, Plan, Reason, make_plan
from backquant.match.scale_rules import float_results, only_moves, recheck
from backquant.nn.intrinsic.rank import drop_rank_checks
from backquant.observe.protocol import measure
from backquant.operators.normal_form import zeros_for_unwritten
from backquant.prepare import (
    ObserverSource,
    PreparedModule,
    Record,
    needed_names,
    prepared_state,
    unobserved,
    with_state,
)
from backquant.qconfig import ConvertCustomConfig, QConfigMapping, qconfig_equals
from backquant.reason_codes import ReasonCode

# A new plan for ``convert_fx`` with another mapping or backend than ``prepare_fx`` had.
#
# ``match`` decides again, on the prepared graph without its observers. An operator that was not prepared
# cannot be quantized any more:
#
# 1. A QConfig at conversion is that of the preparation, or ``None``: leave it in float. Rules may be added;
#    none may be missing. (As in PyTorch, where ``None`` for a fused part, a custom or a standalone module
#    is ignored; here it counts.)
# 2. An operator that was left in float stays so, with the reason that it was given then.
# 3. An operator that the other backend matches otherwise than the first did stays in float.


_WHERE = "convert_fx(..., qconfig_mapping=...)"


def replanned(
    prepared: fx.GraphModule,
    state: Record,
    mapping: QConfigMapping | None,
    backend: BackendConfig | None,
) -> Record:
    """``state`` for this mapping and backend; its plan is still that of the preparation.

    The new plan is ``state.plan`` itself when both are ``None``.

    Raises ConfigError when the mapping asks for something else than that of prepare.
    """
    if mapping is None and backend is None:
        return state
    if mapping is not None:
        check_rules(state.qconfig_mapping, mapping)
    changed = replace(
        state,
        qconfig_mapping=state.qconfig_mapping if mapping is None else mapping,
        backend_config=state.backend_config if backend is None else backend,
    )
    plan = make_plan(
        _as_planned(prepared, state),
        state.scopes,
        changed.backend_config,
        changed.qconfig_mapping,
        fusions=state.plan.fusions,
        custom=CustomMatching.of(state.custom),
        values=GraphValues.given(state.shapes),
    )
    if backend is not None:
        plan = replace(plan, unreached_entries=())
    _check_requests(state, changed, plan)
    return replace(changed, plan=_no_more_than(state.plan, plan))


def check_rules(prepared: QConfigMapping, requested: QConfigMapping) -> None:
    """Raise ConfigError unless ``requested`` has every rule of ``prepared``, with its QConfig or None."""
    known = {(rule.kind, rule.target): rule for rule in requested.rules()}
    for rule in prepared.rules():
        name = f"{rule.kind} {rule.key}".strip()
        found = known.get((rule.kind, rule.target))
        if found is None:
            raise ConfigError(
                f"the mapping lacks the rule {name!r} that the model was prepared with",
                where=_WHERE,
                fix="pass the mapping of prepare_fx, with QConfigs replaced by None",
            )
        skips = found.qconfig is None and rule.kind != "global"
        if not skips and not qconfig_equals(rule.qconfig, found.qconfig):
            raise ConfigError(
                f"the rule {name!r} asks for another QConfig than the model was prepared with",
                where=f"{_WHERE}: {found.qconfig!r} instead of {rule.qconfig!r}",
                fix="pass the QConfig of prepare_fx, or None to leave it in float",
            )


def _check_requests(state: Record, changed: Record, plan: Plan) -> None:
    before = ObserverSource(state.backend_config, state.qconfig_mapping)
    after = ObserverSource(changed.backend_config, changed.qconfig_mapping)
    for name, decision in plan.decisions.items():
        requested = after.qconfig(decision.rule)
        was = before.qconfig(state.plan.decisions[name].rule)
        if requested is not None and not qconfig_equals(was, requested):
            raise ConfigError(
                f"node {name!r} was prepared with another QConfig",
                where=f"{_WHERE}: rule {decision.rule} asks for {requested!r}, prepared with {was!r}",
                fix="pass the QConfig of prepare_fx, or None to leave it in float",
            )


def _no_more_than(before: Plan, after: Plan) -> Plan:
    reasons: list[Reason] = []
    for match in after.matches:
        if not after.decisions[match.anchor].quantized:
            continue
        was = before.decisions[match.anchor]
        prepared = None if was.match is None else before.matches[was.match]
        if was.reasons:
            reasons.append(replace(was.reasons[-1], node=match.anchor))
        elif prepared is None or not was.quantized or not _same(prepared, match):
            reasons.append(
                Reason(
                    match.anchor,
                    ReasonCode.NOT_PREPARED,
                    f"{match.pattern}, quantized",
                    "what was observed when the model was prepared"
                    + ("" if prepared is None else f": {prepared.pattern}"),
                    fix="prepare_fx(..., backend_config=...) with the backend of the conversion",
                )
            )
    return after.refuse(reasons)


def _same(one: Match, two: Match) -> bool:
    return (one.nodes, one.root, one.kind) == (two.nodes, two.root, two.kind)


def _as_planned(prepared: fx.GraphModule, state: Record) -> fx.GraphModule:
    """The graph as it was planned: without observers, with the modules that were there then."""
    twin = unobserved(prepared)
    kinds = {match.anchor: match.kind for match in state.plan.matches}
    for node in twin.graph.nodes:
        name = node.name
        if node.op != "call_module":
            continue
        if kinds.get(name, MatchKind.PATTERN) is not MatchKind.PATTERN:
            node.target = state.scopes[name].path
            set_module(twin, node.target, _stand_in(state.scopes[name].module_type))
            continue
        module = twin.get_submodule(str(node.target))
        planned = _planned_class(state, name)
        if isinstance(module, nn.SyncBatchNorm) and planned is not None:
            set_module(twin, str(node.target), _stand_in(planned))
        else:
            set_module(twin, str(node.target), without_training(module))
    return twin


def _planned_class(state: Record, node: str) -> type | None:
    number = state.plan.decisions[node].match if node in state.plan.decisions else None
    if number is None or len(state.plan.matches[number].nodes) != 1:
        return None
    pattern = state.backend_config.shared_configs[state.plan.matches[number].entry].normal_pattern
    return pattern.anchor.op if isinstance(pattern.anchor.op, type) else None


def _stand_in(cls: type | None) -> nn.Module:
    """A module of a class, for matching only."""
    assert cls is not None and issubclass(cls, nn.Module)
    module: nn.Module = cls.__new__(cls)
    nn.Module.__init__(module)
    return module


def all_in_float(plan: Plan) -> Plan:
    """``plan`` with nothing quantized: a standalone module that is left out at conversion.

    >>> all_in_float(Plan("b")) == Plan("b")
    True
    """
    anchors = (match.anchor for match in plan.matches)
    return plan.refuse(
        Reason(anchor, ReasonCode.LEFT_OUT, "left out at conversion", "")
        for anchor in anchors
        if plan.decisions[anchor].quantized
    )


def convert_to_reference(
    prepared: fx.GraphModule, *, dialect: str = "decomposed", request: ConvertRequest | None = None
) -> ReferenceModel:
    """The reference model of a calibrated (or trained) ``prepared`` model.

    It computes in float what integer kernels would compute: values pass through quantize and
    dequantize nodes, weights are stored as integers. ``prepared`` is not changed and can be
    calibrated further. State: ``reference_state(result)``. Its code is generated when it is first
    used: most often it is lowered and never run. Standalone modules become reference
    models inside of it.

    Args:
        prepared: from ``insert_observers``, calibrated.
        dialect: ``"decomposed"``: ``torch.ops.quantized_decomposed`` on plain tensors;
            ``"quantized_tensor"``: ``torch.quantize_per_tensor`` and ``.dequantize()``.
        request: custom modules; a changed QConfigMapping or backend.

    Raises:
        UsageError: the model is not prepared, or there is no such dialect.
        ConfigError: a reference class without ``from_float``; a dtype that the dialect lacks; an
            observed module that is mapped to nothing; a mapping that asks for more than was prepared.

    >>> from torch import nn
    >>> from backquant.backend_config import BackendConfig
    >>> from backquant.match.plan import Plan
    >>> from backquant.prepare import Record, insert_observers
    >>> from backquant.qconfig import QConfigMapping
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    >>> prepared = insert_observers(gm, Record(Plan("x86"), BackendConfig("x86"), QConfigMapping()))
    >>> [node.name for node in convert_to_reference(prepared).graph.nodes]
    ['input_1', '_0', 'output']
    """
    if dialect not in DIALECTS:
        raise UsageError(
            f"there is no dialect {dialect!r}",
            where="convert_to_reference(dialect=...)",
            fix=" or ".join(f'dialect="{name}"' for name in DIALECTS),
        )
    return _converted(prepared, dialect, ConvertRequest() if request is None else request, None)


def _converted(
    prepared: fx.GraphModule, dialect: str, request: ConvertRequest, passed: Passed | None
) -> ReferenceModel:
    """``passed``: what the parent of a standalone module passes to it quantized."""
    before = prepared_state(prepared)
    state = replanned(prepared, before, request.qconfig_mapping, request.backend_config)
    work = _working_copy(prepared, before, state, dialect)
    work.passed, work.request = passed, request
    asks = described_hardware(state.backend_config)
    run_pass(fold_after_training, work)
    work.qparams = work.measured = run_pass(_measure_groups, prepared, work)
    if asks.scales:
        work.qparams = run_pass(hardware_scales, work)
    work.weight_floors = run_pass(weight_floors, work)
    if asks.ratios:
        work.ratio_units = run_pass(ratio_units, work)
    work.plan = work.plan.refuse(request.in_float.values())
    if work.plan.predicates:
        work.plan = recheck(work.plan, run_pass(measured_scales, work))
    needed, count = run_pass(needed_sites, work, request.leave_float)
    if count:
        what = "results of convolutions and linear layers are"
        what = what if count > 1 else "result of a convolution or linear layer is"
        note = f"{count} {what} float: only float operators read {'them' if count > 1 else 'it'}"
        work.plan = work.plan.noted(note)
    work.keys_of_sites = qparams_keys(work, needed)
    measured = measured_outputs(work)
    gone: set[str] = set()
    swaps: list[CustomSwap] = []
    custom = any(match.kind is MatchKind.CUSTOM_MODULE for match in work.plan.matches)
    if custom or request.custom.observed_to_quantized_mapping:
        swaps = run_pass(custom_swaps, work, request.custom)
    if state.custom is not None:
        gone |= run_pass(dequantize_inputs, work)
    if work.reads_weights:
        gone |= run_pass(convert_functional_weights, work, needed)
    if swaps:
        gone |= run_pass(fuse_outputs, work, swaps)
    run_pass(convert_activations, work, needed, gone)
    run_pass(convert_weighted_modules, work)
    if asks.biases:
        run_pass(round_biases, work)
    if asks.rounding:
        run_pass(round_results, work)
    if swaps:
        run_pass(convert_custom_modules, work, swaps, prepared)
    run_pass(convert_standalone_modules, work, partial(_standalone, work, request))
    if state.custom is not None:
        run_pass(keep_outputs_quantized, work)
    result = run_pass(_finish_reference, work, needed, request)
    with_state(result, replace(reference_state(result), measured_outputs=measured))
    preserve(result, prepared, request.custom.preserved_attributes, "ConvertCustomConfig")
    return result


def _standalone(
    work: Conversion, request: ConvertRequest, module: PreparedModule, node: fx.Node, passed: Passed
) -> ReferenceModel:
    """A standalone module converted for its own backend, or that of its parent; in float if its call is
    float.
    """
    state = prepared_state(module)
    inherits = state.backend_config == prepared_state(work.module).backend_config
    own = ConvertRequest(
        custom=_for_inner(request.custom),
        backend_config=request.backend_config if inherits else None,
        remove_qconfig=request.remove_qconfig,
        kept=request.kept,
        calculate=request.calculate,
    )
    if not work.quantized(node.name):
        module = copy.copy(module)
        module.meta = {**module.meta}
        with_state(module, replace(state, plan=all_in_float(state.plan)))
    return _converted(module, work.dialect, own, passed)


def _for_inner(custom: ConvertCustomConfig) -> ConvertCustomConfig:
    """Attributes are preserved on the whole model only."""
    inner = ConvertCustomConfig()
    inner.observed_to_quantized_mapping = custom.observed_to_quantized_mapping
    return inner


def _working_copy(
    prepared: fx.GraphModule, before: Record, state: Record, dialect: str
) -> Conversion:
    module = rebuilt(ReferenceModel, prepared, shallow_copy(prepared))
    settle_mode_values(module)
    GraphRewriter(module).apply(zeros_for_unwritten)
    inline_custom_gradients(module)
    return Conversion(
        module=module,
        editor=GraphEditor(module, state.provenance.copy()),
        prepared=replace(state, plan=before.plan),
        plan=state.plan,
        source=ObserverSource(state.backend_config, state.qconfig_mapping),
        dialect=dialect,
        qparams={},
        nodes={node.name: node for node in module.graph.nodes},
    )


@contract(requires=[observers_are_called], ensures=[groups_are_measured])
def _measure_groups(prepared: fx.GraphModule, work: Conversion) -> Mapping[str, ObservedQParams]:
    """The qparams of each group by its head; constant weights are measured now, the rest was measured in
    calibration.
    """
    found = measure_functional_weights(prepared, work) if work.reads_weights else {}
    heads = [head for head in work.prepared.sites.groups() if head not in found]
    observers = {head: get_module(prepared, head) for head in heads}
    calculated = work.request.calculate(observers.values())
    is_exported = work.prepared.backend_config.engine is None
    for head, observer in observers.items():
        try:
            found[head] = measure(observer, calculated.get(id(observer)))
        except BackquantError as error:
            where = f"{head}, the observer of {work.prepared.sites[head].value!r}"
            raise type(error)(error.what, where=where, fix=error.fix) from error
        if is_exported and _saw_only_zeros(observer):
            found[head] = _of_zeros(found[head])
    return found


def _saw_only_zeros(observer: nn.Module) -> bool:
    low, high = (getattr(observer, name, None) for name in ("min_val", "max_val"))
    ends = [end for end in (low, high) if isinstance(end, torch.Tensor) and end.numel() == 1]
    return len(ends) == 2 and not any(map(bool, ends))


def _of_zeros(qparams: ObservedQParams) -> ObservedQParams:
    """Any scale holds zeros. Runtimes refuse to requantize to one that is as small as observers give."""
    scale = qparams.scale
    return qparams if scale is None else replace(qparams, scale=torch.ones_like(scale))


@contract(ensures=[record_is_complete])
def _finish_reference(
    work: Conversion, needed: frozenset[str], request: ConvertRequest
) -> ReferenceModel:
    read = _tensors_read(work.module)
    work.module.graph.eliminate_dead_code()
    _drop_tensors(work.module, read - _tensors_read(work.module))
    for site in work.prepared.sites.sites:
        del work.module._modules[site.name]  # by name: an observer that is shared has several
    remove_unused_modules(work.module)
    drop_rank_checks(work.module)
    result = work.module
    verify(result, after="pass 'convert to reference'")
    sites = work.prepared.sites.sites
    state = replace(
        work.prepared,
        plan=work.plan,
        provenance=work.editor.provenance,
        sites=replace(work.prepared.sites, sites=tuple(s for s in sites if s.name in needed)),
        qparams={s.name: work.qparams[s.group] for s in sites if s.name in needed},
        dialect=work.dialect,
        keys=work.keys,
        inputs=work.inputs,
        outputs=work.outputs,
    )
    with_state(result, state)
    if request.remove_qconfig:
        _remove_qconfigs(result)
    return result


def _remove_qconfigs(module: fx.GraphModule) -> None:
    for part in module.modules():
        vars(part).pop("qconfig", None)


def _tensors_read(module: fx.GraphModule) -> set[str]:
    return {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}


def _drop_tensors(module: fx.GraphModule, paths: set[str]) -> None:
    """Remove tensors that the graph no longer reads, unless a called module owns them."""
    called = {str(node.target) for node in module.graph.nodes if node.op == "call_module"}
    for path in paths:
        *owners, name = path.split(".")
        if not any(".".join(owners[: i + 1]) in called for i in range(len(owners))):
            delattr(module.get_submodule(".".join(owners)), name)


# Results that stay float where no quantized operator reads them (``LeaveFloat``, ``results``).
#
# PyTorch quantizes the output of every quantized operator. Where a residual addition or an attention in
# float reads it, that costs accuracy and a conversion, and saves nothing where the kernel gives floats, too.


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


# Standalone modules are converted by themselves, with what their parent passes to them.
#
# Where a standalone module takes quantized inputs, the dequantize node before it goes; where its output
# leaves quantized, a dequantize node follows. In the ``"decomposed"`` dialect the module is converted
# once for each set of qparams that it is called with.

#: The qparams of the inputs that a parent passes quantized to a standalone module, by position.
Passed = Mapping[int, QParams | None]


@contract(ensures=[standalone_are_converted])
def convert_standalone_modules(
    work: Conversion, convert: Callable[[PreparedModule, fx.Node, Passed], ReferenceModel]
) -> None:
    """Replace the prepared standalone modules of ``work.module`` by their reference models.

    Args:
        work: after the observers of the parent were converted.
        convert: a prepared module, the node that calls it, and what it is passed, to its reference
            model.
    """
    inner: dict[str, PreparedModule] = {}
    made: dict[tuple[str, tuple[tuple[int, QParams | None], ...]], str] = {}
    for node in list(work.module.graph.nodes):
        if node.op != "call_module":
            continue
        path = str(node.target)
        module = inner.get(path) or get_module(work.module, path)
        if not isinstance(module, PreparedModule):
            continue
        inner[path] = module
        passed = _take_quantized(node, module)
        key = (path, tuple(passed.items()))
        if key not in made:
            taken = path in made.values()
            made[key] = free_path(work.module, path) if taken else path
            set_module(work.module, made[key], convert(module, node, passed))
        node.target = made[key]
        reference = get_module(work.module, made[key])
        outputs = reference_state(reference).outputs
        if 0 in outputs:
            insert_dequantize(work, node, outputs[0])


def _take_quantized(node: fx.Node, module: PreparedModule) -> dict[int, QParams | None]:
    """Lead the quantized inputs of ``node`` around their dequantize nodes."""
    names = [str(place.target) for place in module.graph.nodes if place.op == "placeholder"]
    custom = prepared_state(module).custom
    passed: dict[int, QParams | None] = {}
    args, kwargs = list(node.args), dict(node.kwargs)
    for index in custom.input_quantized_indexes if custom is not None else ():
        value = args[index] if index < len(args) else kwargs.get(names[index])
        if not isinstance(value, fx.Node) or not is_dequantize(value):
            continue
        passed[index] = plain_qparams(value)
        if index < len(args):
            args[index] = value.args[0]
        else:
            kwargs[names[index]] = value.args[0]
    node.args, node.kwargs = tuple(args), kwargs
    return passed
