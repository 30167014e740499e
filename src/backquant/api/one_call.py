"""``quantize`` and ``explain``: from a model to a quantized one, or to the reasons, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from backquant.api.arguments import (
    Backend,
    Model,
    given_custom,
    given_mapping,
    opened_model,
    resolve_backend,
)
from backquant.backend_config import BackendConfig, LeaveFloat
from backquant.calibrate.examples import checked_example, data_from, example_from
from backquant.calibrate.measure import measure
from backquant.convert import ConvertRequest, convert_to_reference
from backquant.errors import CaptureError, EngineError, UsageError
from backquant.lower import EngineInfo, find_engine
from backquant.lower.engine_dtypes import check_engine_dtypes
from backquant.match.plan import Reason
from backquant.pipeline.capture import Capturing
from backquant.pipeline.default_mapping import DefaultedRequest, mapping_on_engine
from backquant.pipeline.in_float import planned_in_float
from backquant.pipeline.lower import engine_of, quantized_model
from backquant.pipeline.plan import Planned, evaluation_copy, planned
from backquant.pipeline.prepare import prepared_for_inference
from backquant.pipeline.recurrent import has_recurrent, quantizes_recurrent, rules_for_recurrent
from backquant.pipeline.weight_only import weight_only_mapping
from backquant.qconfig import PrepareCustomConfig, QConfigMapping
from backquant.report.build import build_report
from backquant.report.model import Report
from backquant.report.recorded import report_of, report_source, with_reporting
from backquant.report.requirements import check_requirement, given_requirement
from backquant.runtime import QuantizedModel
from backquant.speed.against_float import Ways
from backquant.speed.slower import TIMING, slower_choice, the_faster

__all__ = ["default_mapping", "explain", "quantize"]


# size: the model, its inputs, and one keyword per independent choice of the user
def quantize(
    model: Model,
    example_inputs: Any = None,
    *,
    backend: Backend | None = None,
    calibration: Iterable[Any] | None = None,
    qconfig_mapping: QConfigMapping | None = None,
    weights: str | None = None,
    group_size: int | None = None,
    require: float | str | Sequence[str] | None = None,
    prepare_custom_config: PrepareCustomConfig | None = None,
    capture: str = "auto",
    dynamic_shapes: Any = None,
    slower: str | None = None,
    progress: bool = False,
) -> QuantizedModel:
    """Quantize ``model`` for ``backend``. The model is not changed.

    By default statically, calibrated on data. What is quantized dynamically (at each call), in its
    weights only, or to float16 needs no data: ask for it with
    ``QConfigMapping().set_global(default_dynamic_qconfig)``, or by type or name beside static rules.

    Args:
        model: any module, an exported program, or the name of a ``.pt2`` file that holds one. A module
            is quantized as in evaluation mode; what of it cannot be captured stays float.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
            Default: the first batch of the calibration set; needed without one.
        backend: a name (``list_backends()``), a YAML or JSON file, or a ``BackendConfig``. Default: ``x86``;
            for ``weights`` ``x86_lowbit``.
        calibration: any iterable of batches; a batch has the form of ``example_inputs``. What its
            iterator itself raises passes through. Default: none, if nothing has to be measured.
        qconfig_mapping: what is asked for; default: ``default_mapping(backend)``. What the backend leaves
            in float by default stays there where no rule names the place: a module by its path, the n-th
            use of an operator, or a type for which the backend itself asks something else.
        weights: ``"int4"``, ``"int8"``, …: quantize weights alone, to this dtype, as the backend has it,
            without data; in place of a mapping. ``weight_only_mapping`` gives the mapping that it stands for.
        group_size: with ``weights``: how many of a row share a scale. Default: as the backend has it.
        require: the least share (0 to 1) of multiply-adds that must be quantized, or dotted paths
            of modules that must be. Default: anything at all.
        prepare_custom_config: modules to leave untraced, attributes to keep, and the like.
        capture: ``"trace"`` (symbolic), ``"export"`` (``torch.export``), or ``"auto"``: a trace, and
            where that fails an export. The report says which, and why.
        dynamic_shapes: which sizes of the inputs may vary, as ``torch.export.export`` takes it; asks
            for an export. Default: those that the model leaves free (of images: the batch only).
        slower: what becomes of operators that are slower on integers than in float, as measured here
            on the example inputs: ``"float"`` leaves them in float (all of them, where the model is slower
            than float in every other way and nothing is required), ``"keep"`` keeps them on integers.
            Default: ``"float"`` without a mapping, ``"keep"`` with one.
        progress: show a progress bar on standard error while calibrating.

    Returns:
        A module called like the original, floats in and floats out, with tensors of its own. Its
        ``report`` says what each operator became, and why.

    Raises:
        CaptureError: the model can be captured neither by trace nor by export.
        InputError: example inputs or a batch do not fit the model.
        CalibrationError: the calibration set is empty or holds NaN or infinite values, or there is
            none and values have to be measured.
        EngineError: this build or CPU lacks the backend's engine, or the engine a dtype.
        CoverageError: nothing, or less than required, can be quantized; lists the reasons.
        UsageError: an argument is of the wrong kind.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    >>> quantized = quantize(model, backend="x86", calibration=[torch.randn(4, 8)])
    >>> quantized(torch.randn(2, 8)).shape, quantized.report.coverage
    (torch.Size([2, 8]), 1.0)

    Dynamically, without data:

    >>> from backquant.qconfig import default_dynamic_qconfig
    >>> mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    >>> quantized = quantize(model, torch.randn(1, 8), backend="fbgemm", qconfig_mapping=mapping)
    >>> [kernel.kernel for kernel in quantized.kernels]
    ['quantized.linear_relu_dynamic(fbgemm, 7 bits)']

    Weights alone, in groups of 32 that share a scale:

    >>> model = nn.Sequential(nn.Linear(64, 32))
    >>> quantized = quantize(model, torch.randn(1, 64), weights="int4", group_size=32)
    >>> [kernel.kernel for kernel in quantized.kernels]
    ['aten._weight_int4pack_mm_for_cpu(bfloat16, groups of 32)']
    """
    config = resolve_backend(_backend(backend, weights))
    engine = engine_of(config)
    required = given_requirement(require)
    asked_mapping = _asked_mapping(config, qconfig_mapping, weights, group_size)
    leaves_slower = slower_choice(slower, has_mapping=asked_mapping is not None)
    model = opened_model(model)
    frozen = evaluation_copy(model)
    requested = DefaultedRequest.of(config, engine, *_given(asked_mapping, prepare_custom_config))
    if weights is not None:
        requested = replace(requested, implied=True)
    example, batches = example_from(frozen, example_inputs, calibration)
    data, batches = _data(frozen, example, batches)
    capturing = Capturing(capture, example, dynamic_shapes, requested.own, decompose=True)
    step = _planned(frozen, requested, capturing, data)
    config, plan = step.record.backend_config, step.record.plan
    if engine is not None:
        check_engine_dtypes(plan, config, engine)
    prepared = with_reporting(prepared_for_inference(step, requested.request), frozen, example)
    check_requirement(report_of(prepared), required)
    measure(prepared, batches, progress=progress)

    def converted(in_float: Mapping[int, Reason]) -> QuantizedModel:
        reference = convert_to_reference(
            prepared,
            request=ConvertRequest(leave_float=_left_by_default(config), in_float=in_float),
        )
        check_requirement(report_of(reference), required)
        lowered = quantized_model(reference, model)
        check_requirement(lowered.report, required)
        return lowered

    def in_float(reason: Reason) -> QuantizedModel | None:
        if required is not None:
            return None
        try:
            whole = planned_in_float(frozen, requested.request, capturing, reason)
        except CaptureError:
            return None
        reference = convert_to_reference(
            with_reporting(prepared_for_inference(whole, requested.request), frozen, example)
        )
        return quantized_model(reference, model)

    made = converted({})
    keep = required if isinstance(required, tuple) else ()
    timing = replace(TIMING, keep_named=asked_mapping is not None, keep=keep)
    if quantizes_recurrent(plan):
        timing = replace(timing, least=timing.least_recurrent)
    if leaves_slower and timing.is_worthwhile(engine, made.record):
        made = the_faster(made, Ways(converted, in_float), prepared, frozen, example, timing)
    return made


def explain(  # size: as quantize
    model: Model,
    example_inputs: Any,
    *,
    backend: Backend = "x86",
    qconfig_mapping: QConfigMapping | None = None,
    prepare_custom_config: PrepareCustomConfig | None = None,
    capture: str = "auto",
    dynamic_shapes: Any = None,
) -> Report:
    """Say for every operator what it would become, and why. Needs no data; changes nothing.

    The engine need not run here. Args: as in ``quantize``.

    Raises:
        CaptureError: the model can be captured neither by trace nor by export.
        InputError: the example inputs do not fit the model.
        UsageError: an argument is of the wrong kind.

    >>> import torch
    >>> report = explain(nn.Sequential(nn.Linear(8, 8), nn.Softplus()), torch.zeros(1, 8))
    >>> [(row.operator, row.outcome) for row in report.rows]
    [('Linear', 'quantized'), ('Softplus', 'float')]
    """
    config = resolve_backend(backend)
    frozen = evaluation_copy(opened_model(model))
    engine = _engine_here(config)
    requested = DefaultedRequest.of(config, engine, *_given(qconfig_mapping, prepare_custom_config))
    example = checked_example(frozen, example_inputs)
    capturing = Capturing(capture, example, dynamic_shapes, requested.own, decompose=True)
    step = _planned(frozen, requested, capturing, example)
    prepared = with_reporting(prepared_for_inference(step, requested.request), frozen, example)
    engine_name = f"engine {config.engine}" if config.engine else ""
    return build_report(replace(report_source(prepared), engine=engine_name))


def default_mapping(backend: Backend = "x86") -> QConfigMapping:
    """What ``quantize`` asks for on this machine when no mapping is passed, to be changed in part.

    It is ``get_default_qconfig_mapping(backend)`` with the range of activations that the engine here sums
    without saturation. Raises ``UsageError`` and ``BackendNotFoundError`` as ``quantize`` does.

    >>> import torch
    >>> mapping = default_mapping("x86").set_module_name("1", None)
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> report = quantize(model, calibration=[torch.randn(8, 4)], qconfig_mapping=mapping).report
    >>> [(row.node, row.outcome) for row in report.rows]
    [('_0', 'quantized'), ('_1', 'float')]
    """
    config = resolve_backend(backend)
    engine = engine_of(config)
    return mapping_on_engine(config, engine)[0]


def _given(mapping: Any, custom: Any) -> tuple[QConfigMapping | None, PrepareCustomConfig | None]:
    return None if mapping is None else given_mapping(mapping), given_custom(custom)


def _backend(backend: Backend | None, weights: str | None) -> Backend:
    if backend is not None:
        return backend
    return "x86" if weights is None else "x86_lowbit"


def _asked_mapping(
    config: BackendConfig,
    mapping: QConfigMapping | None,
    weights: str | None,
    group_size: int | None,
) -> QConfigMapping | None:
    """What ``weights`` stands for, or the mapping."""
    if weights is None and group_size is None:
        return mapping
    if weights is None or mapping is not None:
        what = "group_size says nothing without weights" if weights is None else ""
        raise UsageError(
            what or "weights and qconfig_mapping both say what is asked for",
            where="quantize",
            fix='quantize(model, x, weights="int4", group_size=128)\n'
            'qconfig_mapping=weight_only_mapping(backend, "int4", 128).set_module_name(name, None)',
        )
    return weight_only_mapping(config, weights, group_size)


def _engine_here(config: BackendConfig) -> EngineInfo | None:
    """The backend's engine on this machine; ``None`` if it has none or cannot run here.

    Raises ``EngineError`` for a name that no engine has.
    """
    if config.engine is None:
        return None
    find_engine(config.engine)
    try:
        return engine_of(config)
    except EngineError:
        return None


def _data(
    model: nn.Module, example: Any, calibration: Iterable[Any] | None
) -> tuple[Any, Iterable[Any] | None]:
    """What recurrent layers are tried on, and the calibration set that still holds every batch."""
    if has_recurrent(model):
        return data_from(model, example, calibration)
    return example, calibration


def _planned(
    model: nn.Module, requested: DefaultedRequest, capturing: Capturing, data: Any
) -> Planned:
    recurrent = partial(rules_for_recurrent, data=data)
    step = planned(model, requested.request, capturing, (recurrent,))
    return step._replace(record=replace(step.record, plan=requested.annotated(step.record.plan)))


def _left_by_default(config: BackendConfig) -> tuple[LeaveFloat, ...]:
    return () if config.defaults is None else config.defaults.leave_float
