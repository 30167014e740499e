"""From a model and data to a calibrated model: what every call that quantizes in one go begins with."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import fx, nn

from backquant.accuracy.biases.layer_statistics import calibration_with_statistics
from backquant.accuracy.calibrated import Calibrated
from backquant.api.arguments import (
    Model,
    given_custom,
    given_mapping,
    opened_model,
    plain_model,
    sound_backend,
)
from backquant.backend_config import BackendConfig
from backquant.backend_config.registry import Backend
from backquant.calibrate.batches import inputs_of, some_batches
from backquant.calibrate.checkpoint import Checkpoint
from backquant.calibrate.group import ALONE, Ranks, data_of_rank_0, example_of_rank_0
from backquant.calibrate.measure import Feed, measure
from backquant.convert import IntegerEdges, integer_edges
from backquant.errors import CalibrationError, UsageError
from backquant.graph.ranges import Range, joined_ranges, ranges_of
from backquant.graph.state import copy_state
from backquant.lower.engine_dtypes import check_engine_dtypes
from backquant.pipeline.by_sample import LEAST_DECIBELS, compared_batches, layers_by_sample
from backquant.pipeline.capture import Capturing
from backquant.pipeline.default_mapping import DefaultedRequest
from backquant.pipeline.joins import Measured, rules_for_joins
from backquant.pipeline.lower import engine_of
from backquant.pipeline.plan import ChooseBySample, Planned, Rules, evaluation_copy, planned
from backquant.pipeline.prepare import prepared_for_inference
from backquant.pipeline.recurrent import has_recurrent, rules_for_recurrent
from backquant.pipeline.weight_only import weight_only_mapping, weights_by_path
from backquant.qconfig import PrepareCustomConfig, QConfigMapping, default_dynamic_qconfig
from backquant.report.recorded import check_coverage, with_reporting

_AT_EACH_CALL = (
    "quantize at each call, which needs no data:\n"
    "qconfig_mapping=QConfigMapping().set_global(default_dynamic_qconfig)"
)


@dataclass(frozen=True)
class CalibrationCall:
    """The arguments that say what is asked of which backend, as ``quantize`` has them."""

    backend: Backend | None = None
    qconfig_mapping: QConfigMapping | None = None
    weights: str | Mapping[str, str | None] | None = None
    group_size: int | None = None
    prepare_custom_config: PrepareCustomConfig | None = None
    capture: str = "auto"
    dynamic_shapes: Any = None
    integer_io: Any = None
    config: BackendConfig = field(init=False)
    mapping: QConfigMapping | None = field(init=False)
    edges: IntegerEdges | None = field(init=False)

    def __post_init__(self) -> None:
        backend = self.backend
        if backend is None:
            backend = "x86" if self.weights is None else "x86_lowbit"
        config = sound_backend(backend)
        object.__setattr__(self, "config", config)
        object.__setattr__(self, "mapping", self._mapping())
        custom = given_custom(self.prepare_custom_config)
        object.__setattr__(self, "edges", integer_edges(self.integer_io, custom))

    def _needs_no_data(self, model: nn.Module, capturing: Capturing, data: Any) -> bool:
        """Whether this backend quantizes something of this model with what ``_AT_EACH_CALL`` asks for."""
        mapping = QConfigMapping().set_global(default_dynamic_qconfig)
        given = given_request(mapping, self.prepare_custom_config)
        requested = DefaultedRequest.of(self.config, engine_of(self.config), *given, model)
        step = planned_for(model, requested, capturing, data)
        decisions = step.record.plan.decisions.values()
        return any(each.quantized and each.asked_weight is not None for each in decisions)

    @property
    def has_mapping(self) -> bool:
        """Whether somebody said what is asked for."""
        return self.mapping is not None

    def calibrated(
        self,
        model: Model,
        example_inputs: Any,
        calibration: Iterable[Any] | None,
        *,
        required: Any = None,
        progress: bool = False,
        ranks: Ranks = ALONE,
        checkpoint: Checkpoint | None = None,
        feed: Feed | None = None,
        corrects: bool = False,
        sample_decibels: float | None = None,
    ) -> Calibrated:
        """Capture, plan, prepare and calibrate ``model``, which is not changed. Raises as ``quantize``.

        ``feed``: as in ``measure``. ``corrects``: whether some batches are watched, so that biases can be
        corrected by them. ``sample_decibels``: as in ``Recipe``.
        """
        config, engine = self.config, engine_of(self.config)
        opened, mapping = opened_model(model), self.mapping
        if isinstance(self.weights, Mapping):
            mapping = weights_by_path(config, self.weights, self.group_size, opened)
        given = given_request(mapping, _with_float_edges(self.prepare_custom_config))
        source = plain_model(opened, given[1], config)
        frozen = evaluation_copy(source)
        requested = DefaultedRequest.of(config, engine, *given, frozen)
        if self.weights is not None:
            requested = replace(requested, implied=True)
        calibration = inputs_of(frozen, calibration)
        called, batches = example_of_rank_0(ranks, frozen, example_inputs, calibration)
        data = example = called.inputs
        if has_recurrent(frozen):  # they are tried on it
            data, batches = data_of_rank_0(ranks, frozen, example, batches)
        capturing = Capturing(
            self.capture, example, self.dynamic_shapes, requested.own, decompose=True
        )
        own_ranges: ChooseBySample | None = None
        looked_at = partial(_ranges, ranks, batches, example)
        if ranks.size == 1 and (engine is None or not engine.as_described):
            own_ranges = partial(
                layers_by_sample,
                batches=partial(some_batches, batches, compared_batches(batches, example)),
                least=LEAST_DECIBELS if sample_decibels is None else sample_decibels,
            )
        step = planned_for(
            frozen, requested, replace(capturing, called=called), data, own_ranges, looked_at
        )
        stateful = tuple(called.state)
        del called  # its output may be large
        config = step.record.backend_config
        if engine is not None:
            check_engine_dtypes(step.record.plan, config, engine)
        prepared = with_reporting(prepared_for_inference(step, requested.request), frozen, example)
        check_coverage(prepared, required)
        copy_state(frozen, prepared, stateful)
        watched = None
        if corrects and not stateful and ranks.size == 1 and checkpoint is None and feed is None:
            watched = calibration_with_statistics(prepared, batches, example)
        fed = batches if watched is None else watched
        try:
            measure(prepared, fed, progress=progress, ranks=ranks, checkpoint=checkpoint, feed=feed)
        except CalibrationError as error:
            if batches is None and self._needs_no_data(frozen, capturing, data):
                raise CalibrationError(
                    error.what, where=error.where, fix=f"{error.fix}, or {_AT_EACH_CALL}"
                ) from None
            raise
        request = requested.request
        return Calibrated(
            source,
            frozen,
            example,
            batches,
            prepared,
            request,
            capturing,
            config,
            engine,
            watched=watched,
            stateful=stateful,
            edges=self.edges,
        )

    def _mapping(self) -> QConfigMapping | None:
        """What ``weights`` stands for, or the mapping."""
        if self.weights is None and self.group_size is None:
            return self.qconfig_mapping
        if self.weights is None or self.qconfig_mapping is not None:
            what = "group_size says nothing without weights" if self.weights is None else ""
            raise UsageError(
                what or "weights and qconfig_mapping both say what is requested",
                where="quantize",
                fix='weights="int4"'
                if self.weights is None
                else "qconfig_mapping=None\n"
                f"qconfig_mapping=weight_only_mapping(backend, {self.weights!r}, {self.group_size})"
                ".set_module_name(name, None)   # in place of both others",
            )
        if isinstance(self.weights, Mapping):
            return QConfigMapping()  # until there is a model whose layers are named
        return weight_only_mapping(self.config, self.weights, self.group_size)


def given_request(
    mapping: Any, custom: Any
) -> tuple[QConfigMapping | None, PrepareCustomConfig | None]:
    """The two, checked. Raises ``UsageError`` for what is neither.

    >>> given_request(None, None)
    (None, None)
    """
    return None if mapping is None else given_mapping(mapping), given_custom(custom)


def _with_float_edges(custom: Any) -> PrepareCustomConfig | None:
    """``custom`` without quantized inputs and outputs: floats become integers at last."""
    checked = given_custom(custom)
    if IntegerEdges.of_custom(checked) is None:
        return checked
    plain = copy.copy(checked)
    assert plain is not None
    plain.input_quantized_indexes, plain.output_quantized_indexes = [], []
    return plain


def _ranges(
    ranks: Ranks, batches: Any, example: Any, module: fx.GraphModule, names: Collection[str]
) -> dict[str, Range]:
    """The ranges on some batches of all ranks, which decide alike by them."""
    looked_at = [*some_batches(batches, compared_batches(batches, example))] or [example]
    own = ranges_of(module, looked_at, names)
    return joined_ranges(ranks.exchange("comparing ranges", own))


def planned_for(
    model: nn.Module,
    requested: DefaultedRequest,
    capturing: Capturing,
    data: Any,
    by_sample: ChooseBySample | None = None,
    ranges: Measured | None = None,
) -> Planned:
    """The plan for ``model`` with the notes on what was chosen for the user; ``data``: a batch of what the
    model will meet; ``by_sample``: chooses layers whose inputs are scaled sample by sample; ``ranges``: what
    measures them, where values share qparams."""
    rules: tuple[Rules, ...] = (partial(rules_for_recurrent, data=data),)
    if ranges is not None:
        rules = (*rules, partial(rules_for_joins, measured=ranges))
    step = planned(model, requested.request, capturing, rules, by_sample)
    return step._replace(record=replace(step.record, plan=requested.annotated(step.record.plan)))
