"""The steps one by one: names and signatures are those of ``torch.ao.quantization`` where it has them."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from backquant.api.arguments import (
    Model,
    given_backend,
    given_conversion,
    given_fusion,
    given_model,
    given_request,
    opened_model,
    plain_model,
    refuse_not_finite,
    with_known_names,
)
from backquant.backend_config import BackendConfig
from backquant.calibrate.batches import call_that_runs, called_on_example
from backquant.convert import (
    ReferenceModel,
    convert_to_reference,
    original_weights,
    reference_state,
)
from backquant.errors import UsageError
from backquant.garbage import makes_graphs
from backquant.graph import preserve
from backquant.graph.example_call import ExampleCall
from backquant.graph.shapes import ranges_of
from backquant.graph.state import copy_state
from backquant.pipeline.capture import Capturing, spelled_request
from backquant.pipeline.divisors import note_of_divisors
from backquant.pipeline.joins import note_of_joins
from backquant.pipeline.lower import quantized_model
from backquant.pipeline.plan import Planned, evaluation_copy, fused_graph, in_evaluation, planned
from backquant.pipeline.prepare import prepared_for_inference
from backquant.pipeline.training import (
    fuse_for_training,
    fused_for_training,
    prepared_for_training,
    unrounded,
)
from backquant.prepare import PreparedModule, observe_quantized_inputs, prepared_state
from backquant.qconfig import (
    ConvertCustomConfig,
    FuseCustomConfig,
    PrepareCustomConfig,
    QConfigMapping,
)
from backquant.report.model import skipped_in_standalone, warn_of_skipped
from backquant.report.recorded import costs_or_why, with_reporting
from backquant.runtime import QuantizedModel

_log = logging.getLogger("backquant")


@with_known_names
@makes_graphs
def fuse_fx(
    model: nn.Module,
    fuse_custom_config: FuseCustomConfig | dict[str, Any] | None = None,
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> fx.GraphModule:
    """Capture ``model`` and fuse what the backend fuses (convolution with batch norm and ReLU, …).

    In evaluation mode batch norms are folded. In training mode (where PyTorch raises) they stay, in
    the fused modules that ``prepare_qat_fx`` makes, and the result has tensors of its own. The model
    is not changed. Default backend: native.

    Args:
        model: any module that can be traced symbolically.
        fuse_custom_config: attributes to keep. Its dict form is taken without a warning.
        backend_config: the backend whose fusions are applied, or its dict form.

    Raises:
        CaptureError: the model cannot be traced.
        ConfigError: modules to fuse are in different modes; an attribute that the model lacks.

    >>> model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    >>> [type(module).__name__ for module in fuse_fx(model).children()]
    ['ConvBnReLU2d']
    >>> [type(module).__name__ for module in fuse_fx(model.eval()).children()]
    ['ConvReLU2d']
    """
    custom, backend = given_fusion(fuse_custom_config), given_backend(backend_config)
    model = plain_model(given_model(model), backend=backend)
    if model.training:
        fused = fuse_for_training(model, backend, PrepareCustomConfig())
    else:
        fused = fused_graph(model, backend)
    preserve(fused, model, custom.preserved_attributes, "FuseCustomConfig")
    fused.recompile()
    return fused


@with_known_names
@makes_graphs
def prepare_fx(
    model: nn.Module,
    qconfig_mapping: QConfigMapping | dict[str, Any],
    example_inputs: Any,
    prepare_custom_config: PrepareCustomConfig | dict[str, Any] | None = None,
    _equalization_config: Any = None,
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> PreparedModule:
    """Fuse ``model`` and insert observers, ready for calibration: call the result on data.

    As in PyTorch, operators that the backend does not admit are skipped; one warning lists them with the
    reasons. The model is not changed.

    Args:
        model: any module, in evaluation mode; where it cannot be traced symbolically, it is exported
            with ``torch.export`` (see ``quantize``).
        qconfig_mapping: how operators are to be quantized.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments. As
            PyTorch never runs them, inputs that the model does not accept are no error: the warning
            says so, and the model can only be traced.
        prepare_custom_config: modules to leave whole, standalone and custom modules, inputs and
            outputs that are quantized, attributes to keep.
        backend_config: the backend to quantize for. Default: native.

    The dict forms of the configs are taken without a warning (PyTorch's warn).

    Raises:
        CaptureError: as in ``quantize``.
        ConfigError: a QConfig that makes no observer; a custom config that the model does not fit.
        UsageError: an equalization config, which is not supported.

    >>> import torch
    >>> from backquant.qconfig import get_default_qconfig_mapping
    >>> model = nn.Sequential(nn.Linear(4, 4)).eval()
    >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), torch.zeros(1, 4))
    >>> _ = prepared(torch.randn(16, 4))
    >>> convert_fx(prepared)(torch.zeros(2, 4)).shape
    torch.Size([2, 4])
    """
    if _equalization_config is not None:
        raise UsageError(
            "_equalization_config is not supported",
            where="prepare_fx",
            fix="_equalization_config=None   # scale inputs and weights before preparing",
        )
    request = given_request(backend_config, qconfig_mapping, prepare_custom_config)
    model = plain_model(given_model(model), request.custom, request.backend_config)
    called, note = call_that_runs(model, example_inputs)
    how = "trace" if model.training or note else "auto"
    capturing = Capturing(how, None if called is None else called.inputs, called=called)
    step, total = planned(model, request, capturing), 0
    if called is not None and not model.training:
        step, total = _counted(step, called), called.multiply_adds
    step = _with_lost_parts(step, called)
    prepared = prepared_for_inference(step, request)
    copy_state(model, prepared, {} if called is None else called.state)
    with_reporting(prepared, in_evaluation(model), example_inputs, total)
    notes = filter(None, (note,))
    warn_of_skipped(prepared_state(prepared).plan, *skipped_in_standalone(prepared), *notes)
    return prepared


@with_known_names
@makes_graphs
def prepare_qat_fx(
    model: nn.Module,
    qconfig_mapping: QConfigMapping | dict[str, Any],
    example_inputs: Any,
    prepare_custom_config: PrepareCustomConfig | dict[str, Any] | None = None,
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> PreparedModule:
    """A copy of ``model`` to train, in which weights and activations are rounded as on the backend.

    Convolution or linear with batch norm (and ReLU) become QAT modules of ``backquant.nn``; fake
    quantize modules stand where ``prepare_fx`` has observers. Train the result as any module, then
    convert it with ``convert_fx`` or ``convert_to_reference_fx``. ``docs/qat.md`` shows all of it.

    The model is not changed: the result has parameters and buffers of its own (tied ones stay tied).
    As in PyTorch, an evaluation-mode model is accepted. *Different:* the result is then in evaluation
    mode throughout, until ``train()`` is called; arguments such as ``training=self.training`` of
    functional dropout follow ``train()`` and ``eval()``; and a batch norm without a module for
    training (behind a transposed convolution) is trained as it is and folded at conversion, where
    PyTorch raises. What the backend leaves in float by default (``BackendDefaults.leave_float``: norms
    that are written out, say) stays float where no rule of the mapping names the place.

    As in PyTorch, what the backend does not admit is skipped; one warning lists it with the reasons,
    and says so if the model computes something else in the other mode, or if the QConfigs make
    observers, which round nothing.

    Args:
        model: a module that can be traced symbolically, in training mode as a rule. Sizes and flags that
            ``forward`` asks for are those of the example inputs (docs/capture.md says what is held).
        qconfig_mapping: QConfigs that make fake-quantizers: ``get_default_qat_qconfig_mapping(backend)``.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments. As
            PyTorch never runs them, inputs that the model does not accept are no error: the warning
            says so.
        prepare_custom_config: modules to leave untraced, attributes to keep, and the like.
        backend_config: the backend to train for. Default: native.

    Raises:
        CaptureError: the model cannot be traced.
        ConfigError: convolution and batch norm in different modes or of different sizes; a QAT class
            without ``from_float``; a QConfig that makes no observer.

    >>> import torch
    >>> from backquant.qconfig import get_default_qat_qconfig_mapping
    >>> model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    >>> mapping = get_default_qat_qconfig_mapping("qnnpack")
    >>> prepared = prepare_qat_fx(model, mapping, torch.zeros(2, 3, 4, 4))
    >>> prepared(torch.randn(2, 3, 4, 4)).sum().backward()
    >>> type(prepared.get_submodule("0")).__name__, prepared.get_submodule("0").weight.grad.shape
    ('ConvBnReLU2d', torch.Size([3, 3, 1, 1]))
    """
    request = given_request(backend_config, qconfig_mapping, prepare_custom_config)
    # in evaluation mode: there a batch of one is no error
    model = plain_model(given_model(model), request.custom, request.backend_config)
    frozen = evaluation_copy(model)
    called, shapes = call_that_runs(frozen, example_inputs)
    example, total = (None, 0) if called is None else (called.inputs, called.multiply_adds)
    graph = fused_for_training(model, request.backend_config, request.custom, called)
    prepared = prepared_for_training(
        graph, request, example, partial(_with_lost_parts, called=called)
    )
    copy_state(model, prepared, {} if called is None else called.state)
    with_reporting(observe_quantized_inputs(prepared), frozen, example_inputs, total)
    notes = (
        *(graph.difference, unrounded(prepared, request.backend_config.name), shapes),
        *graph.notes,
    )
    inside = skipped_in_standalone(prepared)
    warn_of_skipped(prepared_state(prepared).plan, *inside, *filter(None, notes))
    return prepared


@with_known_names
@makes_graphs
def prepare_export(
    model: Model,
    qconfig_mapping: QConfigMapping | dict[str, Any],
    example_inputs: Any,
    prepare_custom_config: PrepareCustomConfig | dict[str, Any] | None = None,
    backend_config: BackendConfig | dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> PreparedModule:
    """``prepare_fx`` for an exported program, or for a module that is exported first.

    Fuses and inserts observers, ready for calibration: call the result on data, then ``convert_fx``.
    Entries and rules are written as for symbolic traces; docs/capture.md says how they apply to exports.
    Operators that the backend does not admit are skipped; one warning lists them with the reasons. The model
    is not changed.

    Args:
        model: an ``ExportedProgram``, the name of a ``.pt2`` file, or a module (exported as in evaluation
            mode).
        qconfig_mapping: how operators are to be quantized.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
        prepare_custom_config: as in ``prepare_fx``; names of modules need a module.
        backend_config: the backend to quantize for. Default: native.
        dynamic_shapes: of a module: which sizes may vary, as ``torch.export.export`` takes it.

    Raises:
        CaptureError: the model cannot be exported, or was exported in training mode.
        InputError: the example inputs do not fit the model.
        ConfigError: as in ``prepare_fx``.

    >>> import torch
    >>> from backquant.qconfig import get_default_qconfig_mapping
    >>> x = torch.randn(2, 4)
    >>> program = torch.export.export(torch.nn.Linear(4, 3).eval(), (x,))
    >>> prepared = prepare_export(program, get_default_qconfig_mapping("x86"), x)
    >>> _ = prepared(x)
    >>> convert_fx(prepared)(x).shape
    torch.Size([2, 3])
    """
    request = given_request(backend_config, qconfig_mapping, prepare_custom_config)
    model = plain_model(opened_model(model), request.custom, request.backend_config)
    frozen = evaluation_copy(model)
    called = called_on_example(frozen, example_inputs)
    capturing = Capturing("export", called.inputs, dynamic_shapes, called=called)
    step = _with_lost_parts(_counted(planned(frozen, request, capturing), called), called)
    prepared = prepared_for_inference(step, request)
    copy_state(frozen, prepared, called.state)
    with_reporting(prepared, frozen, called.inputs, called.multiply_adds)
    warn_of_skipped(prepared_state(prepared).plan)
    return prepared


def _with_lost_parts(step: Planned, called: ExampleCall | None) -> Planned:
    """With a note, which is logged, on joins that leave little of what they join."""
    if called is None:
        return step
    lost = [
        note
        for notes in (note_of_joins, note_of_divisors)
        for note in notes(
            step.module,
            step.record.plan,
            lambda module, names: ranges_of(module, [called.inputs], names),
        )
    ]
    for note in lost:
        _log.warning("%s", note)
    return step.noted(*lost)


def _counted(step: Planned, called: ExampleCall) -> Planned:
    """With what the graph costs, or why that is not known."""
    if step.record.costs is not None:
        return step
    costs = costs_or_why(step.module, called.inputs)
    return step._replace(record=replace(step.record, costs=costs))


@with_known_names
@makes_graphs
def convert_to_reference_fx(
    graph_module: fx.GraphModule,
    convert_custom_config: ConvertCustomConfig | dict[str, Any] | None = None,
    _remove_qconfig: bool = True,
    qconfig_mapping: QConfigMapping | dict[str, Any] | None = None,
    backend_config: BackendConfig | dict[str, Any] | None = None,
    *,
    dialect: str = "quantized_tensor",
) -> fx.GraphModule:
    """The reference model: float operators between quantize and dequantize, integer weights.

    Args:
        graph_module: from ``prepare_fx``, calibrated; it is not changed.
        convert_custom_config, qconfig_mapping, backend_config: as in ``convert_fx``.
        dialect: ``"quantized_tensor"`` keeps PyTorch's quantize and dequantize calls;
            ``"decomposed"`` has plain integer tensors.

    >>> import torch
    >>> from backquant.qconfig import get_default_qconfig_mapping
    >>> model = nn.Sequential(nn.Linear(4, 4)).eval()
    >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), torch.zeros(1, 4))
    >>> _ = prepared(torch.randn(16, 4))
    >>> convert_to_reference_fx(prepared, dialect="decomposed").get_submodule("0").weight.dtype
    torch.int8
    """
    asked = convert_custom_config, qconfig_mapping, backend_config, _remove_qconfig
    reference = _reference(graph_module, asked, dialect)
    reference.recompile()
    return reference


@with_known_names
@makes_graphs
def convert_fx(
    graph_module: fx.GraphModule,
    convert_custom_config: ConvertCustomConfig | dict[str, Any] | None = None,
    _remove_qconfig: bool = True,
    qconfig_mapping: QConfigMapping | dict[str, Any] | None = None,
    backend_config: BackendConfig | dict[str, Any] | None = None,
    keep_original_weights: bool = False,
) -> QuantizedModel:
    """The quantized model of a calibrated one, on the integer kernels of its backend's engine.

    A backend without an engine gives the reference model; a description without a name as well as without an
    engine is run as PyTorch runs it, on ``torch.backends.quantized.engine``.

    Args:
        graph_module: from ``prepare_fx`` or ``prepare_qat_fx``; it is not changed.
        convert_custom_config: what observed custom modules become; attributes to keep.
        _remove_qconfig: drop the attributes ``qconfig`` of modules.
        qconfig_mapping: the mapping of ``prepare_fx`` with some QConfigs replaced by ``None``, which leaves
            those operators in float. Rules may be added; none may be missing.
        backend_config: another backend than the model was prepared for; operators that it does not admit
            stay in float. Default: the same. (In PyTorch: native.)
        keep_original_weights: keep the float weights and biases of quantized operators as
            ``result.original_weights_lookup``; see ``backquant.convert.weights``.

    Dict forms of the configs are taken without a warning.

    Raises:
        UsageError: the model is not prepared.
        ConfigError: a mapping that differs from that of ``prepare_fx`` in more than ``None``; an observed
            custom module that is mapped to nothing; a reference class without ``from_float``.
        EngineError: this build or CPU lacks the backend's engine, or the engine a dtype.

    >>> import torch
    >>> from backquant.qconfig import get_default_qconfig_mapping
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    >>> mapping = get_default_qconfig_mapping("x86")
    >>> prepared = prepare_fx(model, mapping, torch.zeros(1, 4))
    >>> _ = prepared(torch.randn(16, 4))
    >>> quantized = convert_fx(prepared, qconfig_mapping=mapping.set_module_name("1", None))
    >>> [decision.outcome.value for decision in quantized.plan.decisions.values()]
    ['quantized', 'float']
    """
    asked = convert_custom_config, qconfig_mapping, backend_config, _remove_qconfig
    reference = _reference(graph_module, asked)
    described = reference_state(reference).backend_config
    nameless = not described.name and described.engine is None
    engine = torch.backends.quantized.engine if nameless else None
    quantized = quantized_model(reference, graph_module, None if engine == "none" else engine)
    if keep_original_weights:
        quantized.original_weights_lookup = original_weights(graph_module, reference)
    return quantized


@with_known_names
@makes_graphs
def convert_to_integer_reference(
    graph_module: fx.GraphModule,
    convert_custom_config: ConvertCustomConfig | dict[str, Any] | None = None,
    qconfig_mapping: QConfigMapping | dict[str, Any] | None = None,
    backend_config: BackendConfig | dict[str, Any] | None = None,
) -> QuantizedModel:
    """The integer reference of a calibrated model, with which a chip's simulator is compared.

    Operators exchange integer tensors and give the same bits on every machine: sums are exact, biases are
    integers with the scale input × weight scale, results are made by the requantization and the rounding of
    the description, and functions of one value are tables. Dynamically quantized operators take floats and
    quantize them at each call; operators that stay float run between dequantize and quantize nodes.
    docs/vendors.md says what each operator computes.

    Args:
        graph_module: from ``prepare_fx``, ``prepare_export`` or ``prepare_qat_fx``; it is not changed.
        convert_custom_config, qconfig_mapping, backend_config: as in ``convert_fx``.

    Raises:
        EngineError: an operator is quantized in a way for which there is no integer arithmetic (to
            float16 or 8-bit floats, weights alone, recurrent layers); names it.
        UsageError, ConfigError: as in ``convert_fx``.

    >>> import torch
    >>> from backquant.qconfig import get_default_qconfig_mapping
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sigmoid()).eval()
    >>> prepared = prepare_fx(model, get_default_qconfig_mapping("x86"), torch.zeros(1, 4))
    >>> _ = prepared(torch.randn(16, 4))
    >>> [use.kernel for use in convert_to_integer_reference(prepared).kernels]
    ['integer.linear', 'integer.table(sigmoid)']
    """
    reference = _reference(
        graph_module, (convert_custom_config, qconfig_mapping, backend_config, True)
    )
    return quantized_model(reference, graph_module, "integer_reference")


def _reference(
    prepared: fx.GraphModule, asked: tuple[Any, Any, Any, bool], dialect: str = "decomposed"
) -> ReferenceModel:
    """The reference model of ``prepared``, for the arguments of ``given_conversion``."""
    request = given_conversion(*asked)
    refuse_not_finite(prepared)
    request = spelled_request(prepared, request)
    return convert_to_reference(prepared, dialect=dialect, request=request)
