"""A calibrated model with what it was made from: what recipes and the search begin with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from backquant.accuracy.biases.corrected import Corrected, CutRows, corrected_biases, cut_rows
from backquant.accuracy.biases.layers import Watched, set_biases
from backquant.accuracy.figures import decibel_text
from backquant.accuracy.recipes import Recipe, followed
from backquant.accuracy.recipes.draft import Change, Draft
from backquant.backend_config import BackendConfig
from backquant.calibrate import ProgressBar
from backquant.calibrate.group import ALONE, Ranks
from backquant.convert import (
    ConvertRequest,
    IntegerEdges,
    Kept,
    ReferenceModel,
    as_it_is,
    convert_to_reference,
    reference_state,
    with_integer_edges,
)
from backquant.errors import CaptureError, UsageError
from backquant.graph.devices import on_cpu
from backquant.lower import EngineInfo
from backquant.match.plan import Plan, Reason
from backquant.observe.together import CalculatedOnce
from backquant.pipeline.capture import Capturing
from backquant.pipeline.lower import quantized_model
from backquant.pipeline.prepare import prepared_for_inference
from backquant.pipeline.recapture import planned_in_float
from backquant.prepare import PreparedModule, Record, Request, prepared_state, with_state
from backquant.reason_codes import ReasonCode
from backquant.report.recorded import with_reporting
from backquant.runtime import QuantizedModel

#: SQNR of the outputs below which a report begins with it.
LEAST_DECIBELS = 15.0
LOW = "little is left of the outputs"


@dataclass(frozen=True)
class Calibrated:
    """A calibrated model with what it was made from and for.

    ``source``: the model as it was given; ``frozen``: its copy in evaluation mode. ``batches``: the
    calibration set, ``None`` where there was none. ``biases``: those of quantized layers, by path, where
    they are not the model's own. ``watched``: the batches that these can be corrected by. ``stateful``: the
    paths of the modules in which each call leaves something for the next. ``edges``: the inputs and
    outputs that are integers; everything here sees floats, and ``faced`` is the last step.
    """

    source: nn.Module
    frozen: nn.Module
    example: Any
    batches: Iterable[Any] | None
    prepared: PreparedModule
    request: Request
    capturing: Capturing
    config: BackendConfig
    engine: EngineInfo | None
    weight_qparams: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    biases: Mapping[str, torch.Tensor] = field(default_factory=dict)
    watched: Watched | None = field(default=None, repr=False)
    stateful: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    edges: IntegerEdges | None = None
    _calculate: CalculatedOnce = field(default_factory=CalculatedOnce, repr=False)

    @property
    def conversion(self) -> ConvertRequest:
        """What is asked of its conversion."""
        defaults = self.config.defaults
        leave_float = () if defaults is None else defaults.leave_float
        return ConvertRequest(
            leave_float=leave_float, weight_qparams=self.weight_qparams, biases=self.biases
        )

    def faced(self, reference: ReferenceModel) -> ReferenceModel:
        """``reference``, with integers at the edges where these are asked for. Raises ``ConfigError``."""
        return with_integer_edges(reference, self.edges)

    def reference(
        self, in_float: Mapping[int, Reason] | None = None, kept: Kept = as_it_is
    ) -> ReferenceModel:
        """Its reference model; ``in_float``: matches that stay float after all, with the reasons."""
        request = replace(
            self.conversion, in_float=in_float or {}, kept=kept, calculate=self._calculate
        )
        return convert_to_reference(self.prepared, request=request)

    def on_cpu(self) -> Calibrated:
        """The same where the kernels are that it becomes: ``self`` if all of it is on the CPU."""
        prepared, frozen = on_cpu(self.prepared), on_cpu(self.frozen)
        if prepared is self.prepared and frozen is self.frozen:
            return self
        example = tree_map_only(torch.Tensor, lambda value: value.cpu(), self.example)
        biases = {path: bias.cpu() for path, bias in self.biases.items()}
        moved = replace(self, prepared=prepared, frozen=frozen, example=example, biases=biases)
        return replace(moved, _calculate=CalculatedOnce())

    def in_float(
        self, reason: Reason, quantized: QuantizedModel | None = None
    ) -> QuantizedModel | None:
        """The model with nothing quantized and nothing taken apart, for this reason, or for that for which
        ``quantized`` has no kernel; ``None`` where it cannot be captured so."""
        found = () if quantized is None else quantized.left_in_float
        own = {one.node: one for one in found if one.rule != ReasonCode.FLOAT_IN_REFERENCE}
        try:
            whole = planned_in_float(self.frozen, self.request, self.capturing, reason, own)
        except CaptureError:
            return None
        prepared = prepared_for_inference(whole, self.request)
        reference = convert_to_reference(with_reporting(prepared, self.frozen, self.example))
        return quantized_model(reference, self.source)

    def corrected(self, recipe: Recipe) -> tuple[Calibrated, ReferenceModel | None]:
        """This model with rows of weights cut and biases corrected by what was watched of its calibration,
        as ``recipe`` asks, and its reference model, if that was made; the record and the notes of the plan
        say what it gained."""
        watched = self.watched
        if watched is None or not watched.squares:
            return self, None
        reference = self.reference()
        cut = cut_rows(self.prepared, reference, watched.squares)
        found = None
        if watched.fitting and watched.judging:
            found = corrected_biases(self.prepared, reference, watched.fitting, watched.judging)
        biases = {} if found is None else found.biases
        set_biases(reference, biases)
        for model, state in ((self.prepared, prepared_state), (reference, reference_state)):
            with_state(model, _told(state(model), recipe, cut, found))
        made = replace(self, biases=biases, weight_qparams=cut.qparams, watched=None)
        return made, reference

    def improved(
        self, recipe: Recipe, *, progress: bool = False, ranks: Ranks = ALONE
    ) -> Calibrated:
        """This model after ``recipe``; the record and the notes of the plan say what it gained.
        ``ranks`` share the work, and the batches.

        Raises ``UsageError`` where there is no calibration set, or a module keeps state from call to call.
        """
        if not recipe.steps:
            return self
        if self.batches is None:
            raise UsageError(
                "a recipe needs data",
                where=f"recipe={recipe.name!r}, calibration=None",
                fix="quantize(model, calibration=[batch, ...], recipe=...)",
            )
        if self.stateful:
            raise UsageError(
                f"a recipe compares models call by call, and {next(iter(self.stateful))!r} keeps state "
                "between calls",
                where=f"recipe={recipe.name!r}",
                fix='recipe="default"',
            )
        changes = {
            path: Change(path, bias=self.biases.get(path), qparams=self.weight_qparams.get(path))
            for path in {**self.biases, **self.weight_qparams}
        }
        draft = Draft(self.prepared, replace(self.conversion, biases={}), changes)
        with ProgressBar("recipe") if progress else nullcontext() as bar:
            draft, results = followed(recipe, draft, self.batches, bar, ranks)
        prepared = draft.prepared_model()
        record = prepared_state(prepared)
        before = record.recipe.get("gained", [])
        gained = [*before, *(result.to_dict() for result in results)]
        told = {**recipe.to_dict(), "gained": gained}
        plan = record.plan.noted(*(f"recipe: {result}" for result in results))
        plan = _warned(plan, results[-1].after)
        with_state(prepared, replace(record, plan=plan, recipe=told))
        weight_qparams = draft.conversion().weight_qparams
        made = replace(self, prepared=prepared, weight_qparams=weight_qparams, biases={})
        return replace(made, _calculate=CalculatedOnce())


def _told(record: Record, recipe: Recipe, cut: CutRows, found: Corrected | None) -> Record:
    """``record`` with what the default's corrections did, in the notes of its plan, too."""
    changed = [one for one in (cut, found) if one is not None and one.changes]
    plan = record.plan.noted(*(f"recipe: {one}" for one in changed)) if changed else record.plan
    if found is None:
        return replace(record, plan=plan)
    gained = [found.to_dict()]
    plan = _warned(plan, found.after)
    return replace(record, plan=plan, recipe={**recipe.to_dict(), "gained": gained})


def _warned(plan: Plan, after: float) -> Plan:
    """``plan`` whose first note says so where little is left of the outputs."""
    others = tuple(note for note in plan.notes if not note.startswith(LOW))
    if not after < LEAST_DECIBELS:
        return replace(plan, notes=others)
    note = (
        f"{LOW}, {decibel_text(after)} over the noise of rounding on the calibration data: "
        "print(backquant.compare(model, quantized, data)) shows which operators cost it"
    )
    return replace(plan, notes=(note, *others))
