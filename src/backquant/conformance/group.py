"""Trials side by side: what they ask the engine to build is built together."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from backquant.backend_config import BackendConfig, DTypeConfig
from backquant.conformance.at_bounds import at_bounds, only_claim, operator_of
from backquant.conformance.attempt import (
    Prepared,
    Setting,
    Steps,
    attempt,
    blank_outcome,
    calibrated,
    on_engine,
    prepared_module,
)
from backquant.conformance.case import Outcome, Side, Trial, Verdict, trial_data
from backquant.conformance.combinations import together
from backquant.conformance.data import input_grids, output_scale
from backquant.conformance.engine_protocol import (
    Answer,
    Build,
    GroupingEngine,
    RefusedByEngineError,
)
from backquant.conformance.models import float_model
from backquant.conformance.refusals import in_float, refused_after_calibration
from backquant.conformance.refused import beyond, kept
from backquant.conformance.variants import asked_for
from backquant.convert import convert_to_reference
from backquant.match.fixes import unconditional
from backquant.prepare import prepared_state
from backquant.reason_codes import ReasonCode


def outcomes_of(
    trials: Sequence[Trial], setting: Setting
) -> Iterator[tuple[Trial, Outcome | None]]:
    """The outcomes of each trial as they come, ``(trial, None)`` when one is done."""
    steps: dict[int, Steps] = {at: _steps(trial, setting) for at, trial in enumerate(trials)}
    answers: dict[int, Answer] = {}
    while steps:
        asked: dict[int, Build] = {}
        for at, each in list(steps.items()):
            try:
                item = each.send(answers.pop(at)) if at in answers else next(each)
                while not isinstance(item, Build):
                    yield trials[at], item
                    item = next(each)
            except StopIteration:
                del steps[at]
                yield trials[at], None
            else:
                asked[at] = item
        answers = dict(zip(asked, _built(setting, list(asked.values())), strict=True))


def size_of_groups(setting: Setting) -> int:
    """How many trials go side by side."""
    return setting.engine.group if isinstance(setting.engine, GroupingEngine) else 1


def _steps(trial: Trial, setting: Setting) -> Steps:
    """The steps of one trial; an error that nobody expected is an outcome, too."""
    try:
        if trial.claim.together:
            yield from together(trial, setting)
            return
        if trial.side is Side.ACCEPTED:
            yield from attempt(trial, setting)
            return
        yield from beyond(trial, setting)
        yield from at_bounds(trial, setting)
        yield from at_measured_bounds(trial, setting)
    except Exception as error:
        claim = trial.claim
        yield Outcome(
            trial.key, claim.pattern, claim.dtypes, Side(trial.side), setting.engine.name,
            Verdict.UNPREDICTABLE, detail=f"{type(error).__name__}: {error}"[:300], trial=trial_data(trial),
        )  # fmt: skip


def _built(setting: Setting, builds: Sequence[Build]) -> list[Answer]:
    engine = setting.engine
    if isinstance(engine, GroupingEngine) and len(builds) > 1:
        return engine.build_all(builds)
    return [_one(setting, each) for each in builds]


def _one(setting: Setting, builds: Build) -> Answer:
    try:
        return setting.engine.build(builds.prepared, builds.example)
    except RefusedByEngineError as error:
        return error


# Rules of a description that only measured scales can answer: ``bias_step_upper_bound``.
#
# Results get a scale by which a use lies at the bound, and has to conform, and one by which it lies just
# beyond, and has to be refused by that rule. (Drawn uses that it refuses are drawn again: ``attempt``.)

_BESIDE = 2**-10  # how far a use lies from the bound, as a part of it


def at_measured_bounds(trial: Trial, setting: Setting) -> Steps:
    """The outcomes at the bound of scales to each other, and just beyond it."""
    config = setting.backend.configs[trial.claim.entry].dtype_configs[trial.claim.config]
    bound = config.bias_step_upper_bound
    if bound is None:
        return
    operator, why = operator_of(setting.backend.configs[trial.claim.entry], config, setting)
    if operator is None and "trained" in why:
        return  # the float modules that it is trained from are tried
    for side, where, ratio in (
        (Side.ACCEPTED, "at", bound * (1 - _BESIDE)),
        (Side.REFUSED, "beyond", bound * (1 + _BESIDE)),
    ):
        case = f"{trial.claim} {where}: bias_step_upper_bound {bound:g}"
        blank = replace(blank_outcome(trial, setting), case=case, side=side)
        setting.at(case)
        alone = only_claim(setting.backend, trial, config)
        prepared = None if operator is None else _with_ratio(trial, alone, config, ratio)
        if prepared is None:
            detail = why if operator is None else "it has no bias, or no scale of its own"
            yield replace(blank, verdict=Verdict.UNTRIED, detail=detail)
            return
        blank = replace(blank, use=prepared.model.text)
        refusal = refused_after_calibration(prepared.module)
        if side is Side.REFUSED:
            if refusal is None or refusal.rule != ReasonCode.BIAS_STEP:
                why = (
                    f"a bias beside a ratio of {ratio:g} is beyond the bound, and the plan takes it"
                )
                yield replace(blank, verdict=Verdict.UNPREDICTABLE, detail=why)
            else:
                yield (yield from _asked_past(trial, setting, ratio, blank))
        elif refusal is not None:
            detail = f"refused within the bound: {refusal.rule}: {refusal.asked}"
            yield replace(blank, verdict=Verdict.UNPREDICTABLE, detail=detail)
        else:
            yield from on_engine(trial, setting, prepared, config, blank)


def _asked_past(
    trial: Trial, setting: Setting, ratio: float, blank: Outcome
) -> Generator[Outcome | Build, Answer, Outcome]:
    """Does the engine take it, asked directly?"""
    config = setting.backend.configs[trial.claim.entry].dtype_configs[trial.claim.config]
    free = unconditional(config) if config.where is not None else copy.copy(config)
    free.bias_step_upper_bound = None
    wide = only_claim(setting.backend, trial, free)
    prepared = _with_ratio(trial, wide, free, ratio)
    if prepared is None:
        return blank
    past = replace(setting, backend=wide)
    outcomes = yield from kept(on_engine(trial, past, prepared, free, blank))
    right = bool(outcomes) and all(each.verdict is Verdict.CONFORMS for each in outcomes)
    if not right or not any(each.elements for each in outcomes):
        return blank
    why = "the engine computes it rightly, beyond bias_step_upper_bound"
    return replace(blank, verdict=Verdict.TOO_NARROW, kernel=outcomes[0].kernel, detail=why)


def _with_ratio(
    trial: Trial, backend: BackendConfig, config: DTypeConfig, ratio: float
) -> Prepared | None:
    """The recorded use, whose results have the scale that makes input × weight / output ``ratio``."""
    model = float_model(backend.configs[0], backend, None, config=config)
    request = asked_for(config, next(iter(model.operators), None), None)
    module = prepared_module(model, request, backend, config)
    ranges = ["wide"] * len(model.inputs)
    prepared = calibrated(Prepared(model, request, ranges, module), trial)
    if in_float(prepared_state(module).plan) is not None or not _has_bias(model.module):
        return None
    given, own = input_grids(module)[0], output_scale(module)
    weight = _weight_scale(module)
    observer = _observer_of_result(module)
    if given is None or own is None or weight is None or observer is None:
        return None
    factor = float(given[0]) * weight / (ratio * own)
    for end in ("min_val", "max_val"):
        getattr(observer, end).mul_(factor)
    made = output_scale(module)
    return prepared if made is not None and abs(made / (own * factor) - 1) < _BESIDE / 2 else None


def _has_bias(module: torch.nn.Module) -> bool:
    named = dict(module.named_parameters())
    return any(name.endswith("bias") for name in named) or "tensor1" in named


def _observer_of_result(prepared: fx.GraphModule) -> torch.nn.Module | None:
    [output] = (node for node in prepared.graph.nodes if node.op == "output")
    found = prepared.get_submodule(str(output.args[0].target))
    return found if hasattr(found, "min_val") and hasattr(found, "max_val") else None


def _weight_scale(prepared: fx.GraphModule) -> float | None:
    """The one scale of the weight: a module's, or that of an observed parameter."""
    found = (getattr(m, "weight_scale", None) for m in convert_to_reference(prepared).modules())
    scales = [scale for scale in found if isinstance(scale, torch.Tensor)]
    for node in prepared.graph.nodes:
        if node.op == "call_module" and getattr(node.args[0], "op", "") == "get_attr":
            observer: Any = prepared.get_submodule(str(node.target))
            if hasattr(observer, "calculate_qparams"):
                scales.append(observer.calculate_qparams()[0])
    return float(scales[0]) if scales and scales[0].numel() == 1 else None
