"""``quantize`` and ``explain``: from a model to a quantized one, or to the reasons, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from backquant.api.batches import first_batch
from backquant.api.lowering import quantized_model
from backquant.api.requirements import check_requirement
from backquant.api.steps import (
    Backend,
    Planned,
    evaluation_copy,
    example_of,
    planned,
    resolve_backend,
)
from backquant.backend_config import BackendConfig
from backquant.calibrate import ProgressBar, calibrate
from backquant.convert import convert_to_reference, reference_state
from backquant.graph.costs import multiply_adds
from backquant.lower import QuantizedModel, engine_info
from backquant.prepare import Origin, PreparedModule, insert_observers
from backquant.qconfig import (
    PrepareCustomConfig,
    QConfigMapping,
    get_default_qconfig_mapping,
)
from backquant.report.build import ReportSource, build_report
from backquant.report.model import Report

__all__ = ["explain", "quantize"]


# size: the model, its inputs, and one keyword per independent choice of the user
def quantize(
    model: nn.Module,
    example_inputs: Any = None,
    *,
    backend: Backend = "x86",
    calibration: Iterable[Any],
    qconfig_mapping: QConfigMapping | None = None,
    require: float | Sequence[str] | None = None,
    prepare_custom_config: PrepareCustomConfig | None = None,
    progress: bool = False,
) -> QuantizedModel:
    """Quantize ``model`` statically for ``backend``, calibrated on data. The model is not changed.

    Args:
        model: any module that can be traced symbolically; it is quantized as in evaluation mode.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
            Default: the first batch of the calibration set.
        backend: a name (``list_backends()``), a YAML or JSON file, or a ``BackendConfig``.
        calibration: any iterable of batches; a batch has the form of ``example_inputs``.
        qconfig_mapping: what is asked for; default: ``get_default_qconfig_mapping(backend)``.
        require: the least share (0 to 1) of multiply-adds that must be quantized, or dotted paths
            of modules that must be. Default: anything at all.
        prepare_custom_config: modules to leave untraced, attributes to keep, and the like.
        progress: show a progress bar on the terminal while calibrating.

    Returns:
        A module called like the original, floats in and floats out. Its ``report`` says what each
        operator became, and why.

    Raises:
        CaptureError: the model cannot be traced.
        InputError: example inputs or a batch do not fit the model.
        CalibrationError: the calibration set is empty or holds NaN or infinite values.
        EngineError: this build or CPU lacks the backend's engine.
        CoverageError: nothing, or less than required, can be quantized; lists the reasons.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    >>> quantized = quantize(model, backend="x86", calibration=[torch.randn(4, 8)])
    >>> quantized(torch.randn(2, 8)).shape, quantized.report.coverage
    (torch.Size([2, 8]), 1.0)
    """
    config = resolve_backend(backend)
    engine = None if config.engine is None else engine_info(config.engine)
    frozen = evaluation_copy(model)
    example_inputs, calibration = first_batch(example_inputs, calibration)
    step = _plan(frozen, example_inputs, config, qconfig_mapping, prepare_custom_config)
    costs = multiply_adds(step.module, example_inputs)
    check_requirement(build_report(_source(step, config, costs)), require)
    prepared = _prepared(step, config, qconfig_mapping, prepare_custom_config)
    with ProgressBar("calibrating") if progress else nullcontext() as bar:
        calibrated = calibrate(prepared, calibration, progress=bar)
    reference = convert_to_reference(prepared)
    state = reference_state(reference)
    source = _source(Planned(step.fused, state.plan), config, costs, state.sites, state.qparams)
    check_requirement(build_report(source), require)
    quantized = quantized_model(reference, engine)
    quantized.report = build_report(source.lowered(model, quantized, calibrated.unseen))
    return quantized


def _mapping(config: BackendConfig, mapping: QConfigMapping | None) -> QConfigMapping:
    return get_default_qconfig_mapping(config) if mapping is None else mapping


def _plan(
    model: nn.Module,
    example_inputs: Any,
    config: BackendConfig,
    mapping: QConfigMapping | None,
    custom: PrepareCustomConfig | None,
) -> Planned:
    example_of(model, example_inputs)
    step = planned(model, config, _mapping(config, mapping), custom)
    if mapping is None:  # rules that the user did not write are no news when nothing used them
        return Planned(step.fused, replace(step.plan, unused_rules=()))
    return step


def _prepared(
    step: Planned,
    config: BackendConfig,
    mapping: QConfigMapping | None,
    custom: PrepareCustomConfig | None,
) -> PreparedModule:
    return insert_observers(
        step.module,
        step.plan,
        config,
        _mapping(config, mapping),
        origin=Origin(step.fused.scopes, step.fused.provenance),
        custom=custom,
    )


def _source(
    step: Planned,
    config: BackendConfig,
    costs: dict[str, int],
    sites: Any = None,
    qparams: Any = None,
) -> ReportSource:
    return ReportSource(
        plan=step.plan,
        backend_config=config,
        module=step.module,
        provenance=step.fused.provenance,
        multiply_adds=costs,
        sites=sites,
        qparams=qparams or {},
    )


def explain(
    model: nn.Module,
    example_inputs: Any,
    *,
    backend: Backend = "x86",
    qconfig_mapping: QConfigMapping | None = None,
    prepare_custom_config: PrepareCustomConfig | None = None,
) -> Report:
    """Say for every operator what it would become, and why. Needs no data; changes nothing.

    Args: as in ``quantize``.

    Raises:
        CaptureError: the model cannot be traced.
        InputError: the example inputs do not fit the model.

    >>> import torch
    >>> report = explain(nn.Sequential(nn.Linear(8, 8), nn.Softplus()), torch.zeros(1, 8))
    >>> [(row.operator, row.outcome) for row in report.rows]
    [('Linear', 'quantized'), ('Softplus', 'float')]
    """
    config = resolve_backend(backend)
    frozen = evaluation_copy(model)
    step = _plan(frozen, example_inputs, config, qconfig_mapping, prepare_custom_config)
    prepared = _prepared(step, config, qconfig_mapping, prepare_custom_config)
    state = prepared.meta["backquant"]
    final = Planned(step.fused, state.plan)
    return build_report(
        _source(final, config, multiply_adds(step.module, example_inputs), state.sites)
    )
