"""From a calibrated model to the reference model: every quantized value as quantize/dequantize."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from torch import fx

from backquant.convert.activations import convert_activations, qparams_keys
from backquant.convert.contracts import (
    groups_are_measured,
    observers_are_called,
    record_is_complete,
)
from backquant.convert.custom_modules import (
    convert_custom_modules,
    custom_swaps,
    fuse_outputs,
)
from backquant.convert.dialects import DIALECTS
from backquant.convert.float_results import needed_sites
from backquant.convert.fold import fold_after_training
from backquant.convert.functional_weights import (
    convert_functional_weights,
    measure_functional_weights,
)
from backquant.convert.hardware_biases import round_biases
from backquant.convert.hardware_ratios import ratio_units
from backquant.convert.hardware_rounding import round_results
from backquant.convert.hardware_scales import hardware_scales
from backquant.convert.interface import dequantize_inputs, keep_outputs_quantized
from backquant.convert.replan import all_in_float, replanned
from backquant.convert.request import ConvertRequest
from backquant.convert.scales import measured_scales
from backquant.convert.standalone import Passed, convert_standalone_modules
from backquant.convert.state import Conversion, ReferenceModel
from backquant.convert.weights import convert_weighted_modules
from backquant.dtypes import ObservedQParams
from backquant.errors import BackquantError, UsageError
from backquant.graph import (
    GraphEditor,
    contract,
    get_module,
    inline_custom_gradients,
    preserve,
    rebuilt,
    remove_unused_modules,
    run_pass,
    settle_mode_values,
    shallow_copy,
    verify,
    zeros_for_unwritten,
)
from backquant.match.recheck import recheck
from backquant.nn.intrinsic.rank import drop_rank_checks
from backquant.observe.qparams import measure
from backquant.prepare import (
    ObserverSource,
    PreparedModule,
    Record,
    prepared_state,
    with_state,
)
from backquant.qconfig import ConvertCustomConfig


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
    work.passed, work.weight_qparams, work.kept = passed, request.weight_qparams, request.kept
    work.calculate, work.biases = request.calculate, request.biases
    run_pass(fold_after_training, work)
    work.measured = run_pass(_measure_groups, prepared, work)
    work.qparams = work.measured
    work.qparams = run_pass(hardware_scales, work)
    work.ratio_units = run_pass(ratio_units, work)
    scales = run_pass(measured_scales, work)
    work.plan = recheck(work.plan.refuse(request.in_float.values()), scales)
    needed, count = run_pass(needed_sites, work, request.leave_float)
    if count:
        what = "results of convolutions and linear layers are"
        what = what if count > 1 else "result of a convolution or linear layer is"
        note = f"{count} {what} float: only float operators read {'them' if count > 1 else 'it'}"
        work.plan = work.plan.noted(note)
    work.keys_of_sites = qparams_keys(work, needed)
    swaps = run_pass(custom_swaps, work, request.custom)
    skipped = run_pass(dequantize_inputs, work) | run_pass(convert_functional_weights, work, needed)
    absorbed = run_pass(fuse_outputs, work, swaps)
    run_pass(convert_activations, work, needed, skipped | absorbed)
    run_pass(convert_weighted_modules, work)
    run_pass(round_biases, work)
    run_pass(round_results, work)
    run_pass(convert_custom_modules, work, swaps, prepared)
    run_pass(convert_standalone_modules, work, partial(_standalone, work, request))
    run_pass(keep_outputs_quantized, work)
    result = run_pass(_finish_reference, work, needed, request)
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
    zeros_for_unwritten(module)
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
    found = measure_functional_weights(prepared, work)
    heads = [head for head in work.prepared.sites.groups() if head not in found]
    observers = {head: get_module(prepared, head) for head in heads}
    calculated = work.calculate(observers.values())
    for head, observer in observers.items():
        try:
            found[head] = measure(observer, calculated.get(id(observer)))
        except BackquantError as error:
            where = f"{head}, the observer of {work.prepared.sites[head].value!r}"
            raise type(error)(error.what, where=where, fix=error.fix) from error
    return found


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
