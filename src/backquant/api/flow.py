"""What one quantization is asked for, and its steps: open, look, plan, prepare, calibrate, correct, lower,
choose. Every call that quantizes in one go takes them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from torch import fx, nn

from backquant.accuracy.biases.layers import Watched, calibration_with_statistics
from backquant.accuracy.calibrated import Calibrated
from backquant.accuracy.recipes import Recipe, recipe_of
from backquant.api.arguments import (
    Model,
    given_custom,
    given_mapping,
    opened_model,
    plain_model,
    sound_backend,
)
from backquant.api.outcome import Metric, with_outcome
from backquant.backend_config import BackendConfig
from backquant.backend_config.config import Backend
from backquant.calibrate.batches import example_and_set, inputs_of, kept_set, some_batches
from backquant.calibrate.checkpoint import Checkpoint
from backquant.calibrate.group import ALONE, Ranks, data_of_rank_0, example_of_rank_0
from backquant.calibrate.measure import Feed, measure
from backquant.convert import IntegerEdges, ReferenceModel, integer_edges
from backquant.errors import CalibrationError, UsageError
from backquant.garbage import makes_graphs
from backquant.graph.example_call import ExampleCall
from backquant.graph.shapes import Range, joined_ranges, ranges_of
from backquant.graph.state import copy_state
from backquant.lower.engine_dtypes import check_engine_dtypes
from backquant.match.default_rules import Choice
from backquant.pipeline.by_sample import LEAST_DECIBELS, compared_batches, layers_by_sample
from backquant.pipeline.capture import Capturing
from backquant.pipeline.divisors import rules_for_divisors
from backquant.pipeline.joins import rules_for_joins
from backquant.pipeline.lower import engine_of, quantized_model
from backquant.pipeline.mappings import DefaultedRequest, weight_only_mapping, weights_by_path
from backquant.pipeline.plan import Choices, Planned, evaluation_copy, planned
from backquant.pipeline.prepare import prepared_for_inference
from backquant.pipeline.recurrent import has_recurrent, quantizes_recurrent, rules_for_recurrent
from backquant.prepare import PreparedModule, prepared_state, unobserved
from backquant.qconfig import PrepareCustomConfig, QConfigMapping, default_dynamic_qconfig
from backquant.report.model import given_requirement
from backquant.report.recorded import check_coverage, with_reporting
from backquant.runtime import QuantizedModel
from backquant.speed.against_float import ModelFactories, chosen_on_rank_0, noted
from backquant.speed.cost_table import Kept
from backquant.speed.slower import TIMING, slower_choice, the_faster, without_known_slower

_AT_EACH_CALL = (
    "quantize at each call, which needs no data:\n"
    "qconfig_mapping=QConfigMapping().set_global(default_dynamic_qconfig)"
)


@dataclass(frozen=True)
class Options:
    """What one quantization is asked for: every call that quantizes in one go fills it. The names mean what
    they mean in ``quantize``; wrong values raise as there, but for those that take the model to know.

    ``config``, ``mapping``, ``edges``, ``required`` and ``steps`` are ``backend``, ``qconfig_mapping`` or
    ``weights``, ``integer_io``, ``require`` and ``recipe``, read.
    """

    backend: Backend | None = None
    qconfig_mapping: QConfigMapping | None = None
    weights: str | Mapping[str, str | None] | None = None
    group_size: int | None = None
    require: float | str | Sequence[str] | None = None
    prepare_custom_config: PrepareCustomConfig | None = None
    capture: str = "auto"
    dynamic_shapes: Any = None
    slower: str | None = None
    recipe: Recipe | str | os.PathLike[str] | Sequence[str] = "none"
    metric: Metric | None = None
    integer_io: Any = None
    progress: bool = False
    checkpoint: Checkpoint | None = None
    config: BackendConfig = field(init=False)
    mapping: QConfigMapping | None = field(init=False)
    edges: IntegerEdges | None = field(init=False)
    required: float | tuple[str, ...] | None = field(init=False)
    steps: Recipe = field(init=False)

    def __post_init__(self) -> None:
        backend = self.backend
        if backend is None:
            backend = "x86" if self.weights is None else "x86_lowbit"
        custom = given_custom(self.prepare_custom_config)
        vars(self).update(steps=recipe_of(self.recipe), required=given_requirement(self.require))
        vars(self).update(config=sound_backend(backend))
        vars(self).update(mapping=self._mapping(), edges=integer_edges(self.integer_io, custom))
        slower_choice(self.slower, has_mapping=self.has_mapping)

    @property
    def has_mapping(self) -> bool:
        """Whether somebody said what is asked for."""
        return self.mapping is not None

    @property
    def leaves_slower(self) -> bool:
        """Whether what is slower on integers stays in float."""
        return slower_choice(self.slower, has_mapping=self.has_mapping)

    @property
    def named(self) -> tuple[str, ...]:
        """The paths of the modules that must be quantized."""
        return self.required if isinstance(self.required, tuple) else ()

    def mapping_of(self, model: nn.Module) -> QConfigMapping | None:
        """What is asked for; ``model``: the one whose layers ``weights`` names."""
        if isinstance(self.weights, Mapping):
            return weights_by_path(self.config, self.weights, self.group_size, model)
        return self.mapping

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


class Opened(NamedTuple):
    """A model as it was given, its copy in evaluation mode, and what is asked of it."""

    source: nn.Module
    frozen: nn.Module
    requested: DefaultedRequest


class Inputs(NamedTuple):
    """The example inputs with the call on them, the calibration set, and a batch of what the model will
    meet."""

    called: ExampleCall
    batches: Iterable[Any] | None
    data: Any
    has_recurrent: bool


class Flow:
    """The steps from a model to a quantized one. Each takes what the ones before it gave; none changes that.

    ``ranks``: those that quantize together. ``feed``: how batches reach the observers, as in ``measure``.

    >>> import torch
    >>> flow = Flow(Options("x86"))
    >>> flow.run(nn.Sequential(nn.Linear(8, 8)), calibration=[torch.randn(4, 8)]).report.coverage
    1.0
    """

    def __init__(self, options: Options, ranks: Ranks = ALONE, feed: Feed | None = None) -> None:
        self.options, self.ranks, self.feed = options, ranks, feed
        self.engine = engine_of(options.config)

    @makes_graphs
    def run(
        self, model: Model, example_inputs: Any = None, calibration: Iterable[Any] | None = None
    ) -> QuantizedModel:
        """All steps. Raises as ``quantize``."""
        opened = self.open(model)
        example_inputs, calibration = example_and_set(opened.frozen, example_inputs, calibration)
        if self.options.steps.steps:  # they go over it again and again
            calibration = kept_set(inputs_of(opened.frozen, calibration))
        ready = self._calibrated(opened, example_inputs, calibration)
        ready, reference = self.correct(ready)
        made = self.lower(ready, reference or ready.reference())
        made = self.choose(ready, made)
        copy_state(ready.source, made, ready.stateful)
        return with_outcome(made, ready, self.options.metric, self.ranks)

    def calibrated(
        self, model: Model, example_inputs: Any = None, calibration: Iterable[Any] | None = None
    ) -> Calibrated:
        """The steps up to calibration, which recipes, the search and comparisons begin with."""
        return self._calibrated(self.open(model), example_inputs, calibration)

    def _calibrated(
        self, opened: Opened, example_inputs: Any, calibration: Iterable[Any] | None
    ) -> Calibrated:
        inputs = self.look(opened, example_inputs, calibration)
        how, shapes, own = self.options.capture, self.options.dynamic_shapes, opened.requested.own
        capturing = Capturing(how, inputs.called.inputs, shapes, own, decompose=True)
        step = self.plan(opened, inputs, capturing)
        inputs = inputs._replace(called=inputs.called._replace(output=None))  # it may be large
        prepared = self.prepare(opened, inputs, step)
        watched = self.calibrate(opened, inputs, prepared, capturing)
        return Calibrated(
            opened.source,
            opened.frozen,
            inputs.called.inputs,
            inputs.batches,
            prepared,
            opened.requested.request,
            capturing,
            step.record.backend_config,
            self.engine,
            watched=watched,
            stateful=inputs.called.state,
            edges=self.options.edges,
        )

    def open(self, model: Model) -> Opened:
        """Check the model, and say what is asked of it."""
        options, opened = self.options, opened_model(model)
        custom = _with_float_edges(options.prepare_custom_config)
        given = checked_request(options.mapping_of(opened), custom)
        source = plain_model(opened, given[1], options.config)
        frozen = evaluation_copy(source)
        requested = DefaultedRequest.of(options.config, self.engine, *given, frozen)
        if options.weights is not None:
            requested = replace(requested, implied=True)
        return Opened(source, frozen, requested)

    def look(
        self, opened: Opened, example_inputs: Any, calibration: Iterable[Any] | None
    ) -> Inputs:
        """Call the model on its example inputs; the calibration set still holds every batch."""
        calibration = inputs_of(opened.frozen, calibration)
        called, batches = example_of_rank_0(self.ranks, opened.frozen, example_inputs, calibration)
        data, is_recurrent = called.inputs, has_recurrent(opened.frozen)
        if is_recurrent:  # they are tried on it
            data, batches = data_of_rank_0(self.ranks, opened.frozen, data, batches)
        return Inputs(called, batches, data, is_recurrent)

    def plan(self, opened: Opened, inputs: Inputs, capturing: Capturing) -> Planned:
        """Capture the model, decide about each operator, and fuse. Raises ``EngineError`` where the engine
        lacks a dtype."""
        capturing = replace(capturing, called=inputs.called)
        choices = self._choices(inputs)
        step = planned_for(opened.frozen, opened.requested, capturing, choices)
        if self.engine is not None:
            check_engine_dtypes(step.record.plan, step.record.backend_config, self.engine)
        return step

    def _choices(self, inputs: Inputs) -> Choices:
        """What is chosen on data, by all ranks alike."""
        example, batches = inputs.called.inputs, inputs.batches
        measured = partial(_ranges, self.ranks, batches, example)
        recurrent = (partial(rules_for_recurrent, data=inputs.data),)
        rules: tuple[Choice, ...] = (
            *(recurrent if inputs.has_recurrent else ()),
            partial(rules_for_joins, measured=measured),
            partial(rules_for_divisors, measured=measured),
        )
        if self.ranks.size > 1 or (self.engine is not None and self.engine.as_described):
            return Choices(rules)
        least = self.options.steps.sample_decibels
        scaled = partial(
            layers_by_sample,
            batches=partial(some_batches, batches, compared_batches(batches, example)),
            least=LEAST_DECIBELS if least is None else least,
        )
        return Choices(rules, scaled)

    def prepare(self, opened: Opened, inputs: Inputs, step: Planned) -> PreparedModule:
        """Insert observers. Raises ``CoverageError`` where less than required is quantized."""
        prepared = prepared_for_inference(step, opened.requested.request)
        with_reporting(prepared, opened.frozen, inputs.called.inputs)
        check_coverage(prepared, self.options.required)
        copy_state(opened.frozen, prepared, inputs.called.state)
        return prepared

    def calibrate(
        self, opened: Opened, inputs: Inputs, prepared: PreparedModule, capturing: Capturing
    ) -> Watched | None:
        """Show the calibration set to the observers; what was watched, so that biases can be corrected by
        it, where the recipe asks for that."""
        options, batches, watched = self.options, inputs.batches, None
        plainly = self.ranks.size == 1 and options.checkpoint is None and self.feed is None
        if options.steps.biases and plainly and not inputs.called.state:
            watched = calibration_with_statistics(prepared, batches, inputs.called.inputs)
        try:
            measure(
                prepared,
                batches if watched is None else watched,
                progress=options.progress,
                ranks=self.ranks,
                checkpoint=options.checkpoint,
                feed=self.feed,
            )
        except CalibrationError as error:
            if batches is None and self._needs_no_data(opened, inputs, capturing):
                fix = f"{error.fix}, or {_AT_EACH_CALL}"
                raise CalibrationError(error.what, where=error.where, fix=fix) from None
            raise
        return watched

    def _needs_no_data(self, opened: Opened, inputs: Inputs, capturing: Capturing) -> bool:
        """Whether this backend quantizes something of this model with what ``_AT_EACH_CALL`` asks for."""
        mapping = QConfigMapping().set_global(default_dynamic_qconfig)
        given = checked_request(mapping, self.options.prepare_custom_config)
        requested = DefaultedRequest.of(self.options.config, self.engine, *given, opened.frozen)
        choices = Choices((partial(rules_for_recurrent, data=inputs.data),))
        step = planned_for(opened.frozen, requested, capturing, choices)
        decisions = step.record.plan.decisions.values()
        return any(each.quantized and each.asked_weight is not None for each in decisions)

    def correct(self, ready: Calibrated) -> tuple[Calibrated, ReferenceModel | None]:
        """Follow the recipe; what it gives, where its kernels are, and its reference model if that was
        made."""
        steps = self.options.steps
        ready, reference = ready.corrected(steps)
        ready = ready.improved(steps, progress=self.options.progress, ranks=self.ranks)
        if self.engine is not None:
            ready = ready.on_cpu()
        return ready, None if steps.steps else reference

    def lower(
        self, ready: Calibrated, reference: ReferenceModel, source: nn.Module | None = None
    ) -> QuantizedModel:
        """The kernels of a converted model, which shares no tensor with ``source``; default: the original."""
        check_coverage(reference, self.options.required)
        made = quantized_model(ready.faced(reference), ready.source if source is None else source)
        check_coverage(made, self.options.required)
        return made

    def choose(self, ready: Calibrated, made: QuantizedModel) -> QuantizedModel:
        """Leave in float what is slower on integers, as measured here or as the description says."""
        options = self.options
        if not options.leaves_slower:
            return made
        has_floats = ready.edges is None and options.required is None
        models = ModelFactories(
            lambda in_float: self.lower(ready, ready.reference(in_float)),
            lambda reason: ready.in_float(reason, made) if has_floats else None,
        )
        if self.engine is None:
            kept = Kept(options.named, named=options.has_mapping)
            return without_known_slower(made, models, unobserved(ready.prepared), kept)
        timing = replace(TIMING, keep_named=options.has_mapping, keep=options.named)
        if quantizes_recurrent(prepared_state(ready.prepared).plan):
            timing = replace(timing, least=timing.least_recurrent)
        if not timing.is_worthwhile(self.engine, made.record):
            return made
        if ready.edges is not None:  # a call of it has other inputs than one of the float model
            return noted(made, _EDGES_NOT_TIMED)
        faster = partial(
            the_faster,
            made,
            prepared=ready.prepared,
            original=ready.frozen,
            example=ready.example,
            timing=timing,
        )
        return chosen_on_rank_0(self.ranks, made, models, faster)


_EDGES_NOT_TIMED = (
    "not timed, since inputs or outputs are integers: what is slower on integers stays on them"
)


def checked_request(
    mapping: Any, custom: Any
) -> tuple[QConfigMapping | None, PrepareCustomConfig | None]:
    """The two, checked. Raises ``UsageError`` for what is neither.

    >>> checked_request(None, None)
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
    model: nn.Module, requested: DefaultedRequest, capturing: Capturing, choices: Choices
) -> Planned:
    """The plan for ``model`` with the notes on what was chosen for the user."""
    step = planned(model, requested.request, capturing, choices)
    return step._replace(record=replace(step.record, plan=requested.annotated(step.record.plan)))
