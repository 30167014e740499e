"""``quantize`` and ``explain``: from a model to a quantized one, or to the reasons, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from backquant.api.activation_range import mapping_on_engine
from backquant.api.against_float import Converted
from backquant.api.arguments import (
    Backend,
    Model,
    given_custom,
    given_mapping,
    opened_model,
    resolve_backend,
)
from backquant.api.capturing import Capturing
from backquant.api.costs import costs_of
from backquant.api.engine_dtypes import check_engine_dtypes
from backquant.api.examples import checked_example, data_from, example_from
from backquant.api.lowering import quantized_model
from backquant.api.measuring import measure
from backquant.api.prepared import prepared_for_inference
from backquant.api.recurrent import has_recurrent, quantizes_recurrent, rules_for_recurrent
from backquant.api.reporting import report_of, report_source, reported, with_reporting
from backquant.api.requirements import check_requirement, given_requirement
from backquant.api.slower import TIMING, asked_slower, the_faster
from backquant.api.steps import Planned, evaluation_copy, planned
from backquant.backend_config import BackendConfig, LeaveFloat
from backquant.convert import ConvertAsked, convert_to_reference
from backquant.errors import EngineError
from backquant.graph.example_spec import ExampleSpec
from backquant.lower import EngineInfo, engine_info
from backquant.match.plan import Reason, RuleKind, RuleRef
from backquant.prepare import Asked, PreparedModule, observe_quantized_inputs
from backquant.qconfig import (
    PrepareCustomConfig,
    QConfig,
    QConfigMapping,
    get_default_qconfig_mapping,
    qconfig_equals,
)
from backquant.report.build import build_report
from backquant.report.model import Report
from backquant.runtime import QuantizedModel

__all__ = ["explain", "quantize"]


# size: the model, its inputs, and one keyword per independent choice of the user
def quantize(
    model: Model,
    example_inputs: Any = None,
    *,
    backend: Backend = "x86",
    calibration: Iterable[Any] | None = None,
    qconfig_mapping: QConfigMapping | None = None,
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
        backend: a name (``list_backends()``), a YAML or JSON file, or a ``BackendConfig``.
        calibration: any iterable of batches; a batch has the form of ``example_inputs``. What its
            iterator itself raises passes through. Default: none, if nothing has to be measured.
        qconfig_mapping: what is asked for; default: ``default_mapping(backend)``. What the backend leaves
            in float by default stays there where no rule names the place: a module by its path, the n-th
            use of an operator, or a type for which the backend itself asks something else.
        require: the least share (0 to 1) of multiply-adds that must be quantized, or dotted paths
            of modules that must be. Default: anything at all.
        prepare_custom_config: modules to leave untraced, attributes to keep, and the like.
        capture: ``"trace"`` (symbolic), ``"export"`` (``torch.export``), or ``"auto"``: a trace, and
            where that fails an export. The report says which, and why.
        dynamic_shapes: which sizes of the inputs may vary, as ``torch.export.export`` takes it; asks
            for an export. Default: those that the model leaves free (of images: the batch only).
        slower: what becomes of operators that are slower on integers than in float, as measured here
            on the example inputs: ``"float"`` leaves them in float, ``"keep"`` keeps them on integers.
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
    """
    config = resolve_backend(backend)
    engine = None if config.engine is None else engine_info(config.engine)
    required = given_requirement(require)
    leaves_slower = asked_slower(slower, has_mapping=qconfig_mapping is not None)
    model = opened_model(model)
    frozen = evaluation_copy(model)
    ask = _Ask.of(config, engine, qconfig_mapping, prepare_custom_config)
    example, batches = example_from(frozen, example_inputs, calibration)
    data, batches = _data(frozen, example, batches)
    capturing = Capturing(capture, example, dynamic_shapes, ask.own, decompose=True)
    step = _planned(frozen, ask, capturing, data)
    config = step.backend
    if engine is not None:
        check_engine_dtypes(step.plan, config, engine)
    costs = costs_of(step.module, example)
    prepared = with_reporting(_prepared(step, ask), frozen, example, costs)
    check_requirement(report_of(prepared), required)
    calibrated = measure(prepared, batches, progress=progress)

    def converted(in_float: Mapping[int, Reason]) -> Converted:
        reference = convert_to_reference(
            prepared, asked=ConvertAsked(leave_float=_left_by_default(config), in_float=in_float)
        )
        source = report_source(reference)
        check_requirement(build_report(source), required)
        lowered = quantized_model(reference, engine, model)
        lowered.example = ExampleSpec.of(example)
        check_requirement(reported(source, lowered), required)
        return Converted(lowered, source)

    made = converted({})
    keep = required if isinstance(required, tuple) else ()
    timing = replace(TIMING, keep_named=qconfig_mapping is not None, keep=keep)
    if quantizes_recurrent(step.plan):  # of which the smallest lose the most
        timing = replace(timing, least=0)
    if leaves_slower and timing.is_worthwhile(engine, costs.multiply_adds.values()):
        made = the_faster(made, converted, prepared, frozen, example, timing)
    quantized = made.model
    quantized.report = reported(made.source, quantized, calibrated.unseen)
    return quantized


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
    model = opened_model(model)
    frozen = evaluation_copy(model)
    engine = _engine_here(config)
    ask = _Ask.of(config, engine, qconfig_mapping, prepare_custom_config)
    example = checked_example(frozen, example_inputs)
    capturing = Capturing(capture, example, dynamic_shapes, ask.own, decompose=True)
    step = _planned(frozen, ask, capturing, example)
    config = step.backend
    costs = costs_of(step.module, example)
    prepared = with_reporting(_prepared(step, ask), frozen, example, costs)
    engine_name = f"engine {config.engine}" if config.engine else ""
    return build_report(replace(report_source(prepared), engine=engine_name))


@dataclass(frozen=True)
class _Ask:
    """What the user asks of which backend; ``own``: what the backend would ask itself, as PyTorch has
    it and as ``quantize`` does. ``notes``: what was chosen for the user."""

    config: BackendConfig
    mapping: QConfigMapping
    custom: PrepareCustomConfig | None
    own: tuple[QConfigMapping, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(
        cls,
        config: BackendConfig,
        engine: EngineInfo | None,
        mapping: Any,
        custom: Any,
    ) -> _Ask:
        own = get_default_qconfig_mapping(config)
        default, notes = mapping_on_engine(config, engine)
        if mapping is None:
            return cls(config, default, given_custom(custom), (own, default), notes)
        return cls(config, given_mapping(mapping), given_custom(custom), (own, default), ())

    def is_of_the_backend(self, rule: RuleRef) -> bool:
        """Whether a rule stands in the backend's own mapping, too: no news when nothing used it."""
        if rule.kind is not RuleKind.OBJECT_TYPE:
            return any(self.mapping is own for own in self.own)
        key, asked = list(self.mapping.object_type_qconfigs.items())[rule.index]
        known = (mapping.object_type_qconfigs for mapping in self.own)
        own = [found[key] for found in known if key in found]
        return any(_same(qconfig, asked) for qconfig in own)


def _same(one: QConfig | None, other: QConfig | None) -> bool:
    if one is None or other is None:
        return one is other
    return qconfig_equals(one, other)


def _engine_here(config: BackendConfig) -> EngineInfo | None:
    """The backend's engine on this machine; ``None`` if it has none or cannot run here."""
    try:
        return None if config.engine is None else engine_info(config.engine)
    except EngineError:
        return None


def _data(
    model: nn.Module, example: Any, calibration: Iterable[Any] | None
) -> tuple[Any, Iterable[Any] | None]:
    """What recurrent layers are tried on, and the calibration set that still holds every batch."""
    if has_recurrent(model):
        return data_from(model, example, calibration)
    return example, calibration


def _planned(model: nn.Module, ask: _Ask, capturing: Capturing, data: Any) -> Planned:
    recurrent = partial(rules_for_recurrent, data=data)
    step = planned(model, ask.config, ask.mapping, ask.custom, capturing, (recurrent,))
    unused = tuple(rule for rule in step.plan.unused_rules if not ask.is_of_the_backend(rule))
    notes = (*step.plan.notes, *ask.notes)
    return replace(step, plan=replace(step.plan, unused_rules=unused, notes=notes))


def _left_by_default(config: BackendConfig) -> tuple[LeaveFloat, ...]:
    return () if config.defaults is None else config.defaults.leave_float


def _prepared(step: Planned, ask: _Ask) -> PreparedModule:
    asked = Asked(ask.config, ask.mapping, ask.custom)
    return observe_quantized_inputs(prepared_for_inference(step, asked))
