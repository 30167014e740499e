"""From a calibrated model to the reference model: every quantized value as quantize/dequantize."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import fx, nn

from backquant.backend_config import LeaveFloat
from backquant.convert.activations import convert_activations, qparams_keys
from backquant.convert.contracts import (
    groups_are_measured,
    observers_are_called,
    record_is_complete,
    standalone_are_converted,
)
from backquant.convert.custom_modules import (
    convert_custom_modules,
    custom_swaps,
    fuse_outputs,
)
from backquant.convert.dialects import DIALECTS, is_dequantize
from backquant.convert.fold import fold_after_training
from backquant.convert.functional_weights import (
    convert_functional_weights,
    measure_functional_weights,
)
from backquant.convert.hardware_biases import round_biases
from backquant.convert.hardware_ratios import ratio_units
from backquant.convert.hardware_rounding import round_results
from backquant.convert.hardware_scales import hardware_scales
from backquant.convert.integer_edges import measured_outputs
from backquant.convert.interface import (
    dequantize_inputs,
    insert_dequantize,
    keep_outputs_quantized,
    plain_qparams,
)
from backquant.convert.replan import all_in_float, replanned
from backquant.convert.request import ConvertRequest
from backquant.convert.scales import measured_scales
from backquant.convert.state import Conversion, ReferenceModel, reference_state
from backquant.convert.weights import convert_weighted_modules
from backquant.dtypes import ObservedQParams, QParams
from backquant.errors import BackquantError, UsageError
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
    zeros_for_unwritten,
)
from backquant.match.recheck import float_results, only_moves, recheck
from backquant.nn.intrinsic.rank import drop_rank_checks
from backquant.observe.qparams import measure
from backquant.prepare import (
    ObserverSource,
    PreparedModule,
    Record,
    needed_names,
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
    measured = measured_outputs(work)
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
    found = measure_functional_weights(prepared, work)
    heads = [head for head in work.prepared.sites.groups() if head not in found]
    observers = {head: get_module(prepared, head) for head in heads}
    calculated = work.calculate(observers.values())
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
