"""Uses at the edges of conditions: at a bound they conform, just beyond they are refused, for that bound."""

from __future__ import annotations

import copy
from collections.abc import Generator
from dataclasses import replace

from backquant.backend_config import BackendConfig, BackendPatternConfig, DTypeConfig
from backquant.conformance.attempt import (
    Prepared,
    Setting,
    Steps,
    blank_outcome,
    calibrated,
    on_engine,
    prepared_module,
)
from backquant.conformance.bounds import Bound, bounds_of, condition_of
from backquant.conformance.case import Outcome, Side, Trial, Verdict
from backquant.conformance.data import drawn_ranges
from backquant.conformance.engine_protocol import Answer, Build
from backquant.conformance.models import NoExampleError, float_model
from backquant.conformance.refusals import by_condition, in_float
from backquant.conformance.refused import kept
from backquant.conformance.variants import asked_for
from backquant.errors import BackquantError
from backquant.match.fixes import unconditional
from backquant.operators.operator import Operator
from backquant.prepare import prepared_state
from backquant.reason_codes import ReasonCode


def at_bounds(trial: Trial, setting: Setting) -> Steps:
    """The outcomes at each bound of the conditions of a claim, and beyond it."""
    entry = setting.backend.configs[trial.claim.entry]
    config = entry.dtype_configs[trial.claim.config]
    if condition_of(entry, config) is None:
        return
    operator, why = operator_of(entry, config, setting)
    if operator is None:
        blank = replace(blank_outcome(trial, setting), case=f"{trial.claim} at: its conditions")
        yield replace(blank, verdict=Verdict.UNTRIED, detail=why)
        return
    for bound in bounds_of(entry, config, setting.backend, operator):
        where = "at" if bound.inside else "beyond"
        blank = replace(
            blank_outcome(trial, setting),
            case=f"{trial.claim} {where}: {bound.name}",
            side=Side.ACCEPTED if bound.inside else Side.REFUSED,
        )
        setting.at(blank.case)
        if bound.sample is None:
            why = f"no use was found {'at' if bound.inside else 'just beyond'} {bound.name}"
            yield replace(blank, verdict=Verdict.UNTRIED, detail=why)
        elif bound.inside:
            yield from _inside(trial, setting, bound, blank)
        else:
            yield (yield from _outside(trial, setting, bound, blank))


def operator_of(
    entry: BackendPatternConfig, config: DTypeConfig, setting: Setting
) -> tuple[Operator | None, str]:
    """The operator whose uses are tried; ``None`` with the reason where there is none."""
    try:
        plain = float_model(entry, setting.backend, None, setting.examples, config)
    except NoExampleError as error:
        return None, str(error)
    if plain.trained:
        return None, "its conditions are tried on the float modules that it is trained from"
    operator = next(iter(plain.operators), None)
    return operator, "uses near an example of one's own are not known"


def _prepared(trial: Trial, backend: BackendConfig, bound: Bound, config: DTypeConfig) -> Prepared:
    entry = backend.configs[0]
    model = float_model(entry, backend, None, config=config, sample=bound.sample)
    request = asked_for(config, next(iter(model.operators), None), None)
    ranges = drawn_ranges(len(model.inputs), trial.choice(), 0)
    module = prepared_module(model, request, backend, config)
    return calibrated(Prepared(model, request, ranges, module), trial)


def _inside(trial: Trial, setting: Setting, bound: Bound, blank: Outcome) -> Steps:
    config = setting.backend.configs[trial.claim.entry].dtype_configs[trial.claim.config]
    alone = only_claim(setting.backend, trial, config)
    prepared = _prepared(trial, alone, bound, config)
    blank = replace(blank, use=prepared.model.text)
    refusal = in_float(prepared_state(prepared.module).plan)
    if refusal is not None:
        yield replace(blank, verdict=Verdict.UNPREDICTABLE, detail=refusal)
        return
    yield from on_engine(trial, setting, prepared, config, blank)


def _outside(
    trial: Trial, setting: Setting, bound: Bound, blank: Outcome
) -> Generator[Outcome | Build, Answer, Outcome]:
    """Refused by this part of the condition; and does the engine take it, asked directly?"""
    config = setting.backend.configs[trial.claim.entry].dtype_configs[trial.claim.config]
    prepared = _prepared(trial, only_claim(setting.backend, trial, config), bound, config)
    blank = replace(blank, use=prepared.model.text)
    plan = prepared_state(prepared.module).plan
    refusal = in_float(plan)
    if refusal is None:
        why = f"{prepared.model.text} is beyond {bound.part}, and the plan takes it"
        return replace(blank, verdict=Verdict.UNPREDICTABLE, detail=why)
    told = [r for d in plan.decisions.values() for r in d.reasons if r.rule == ReasonCode.CONDITION]
    if not by_condition(plan) or not any(str(bound.part) in str(r.admitted) for r in told):
        why = f"refused for another reason than {bound.part}: {refusal}"
        return replace(blank, verdict=Verdict.UNPREDICTABLE, detail=why[:300])
    return (yield from _asked_past(trial, setting, bound, blank))


def _asked_past(
    trial: Trial, setting: Setting, bound: Bound, blank: Outcome
) -> Generator[Outcome | Build, Answer, Outcome]:
    config = setting.backend.configs[trial.claim.entry].dtype_configs[trial.claim.config]
    free = unconditional(config)
    wide = only_claim(setting.backend, trial, free)
    for entry in wide.configs:
        entry.set_where(None)
    try:
        prepared = _prepared(trial, wide, bound, free)
    except (BackquantError, RuntimeError, ValueError):
        return blank
    if in_float(prepared_state(prepared.module).plan) is not None:
        return blank
    past = replace(setting, backend=wide)
    outcomes = yield from kept(on_engine(trial, past, prepared, free, blank))
    right = bool(outcomes) and all(each.verdict is Verdict.CONFORMS for each in outcomes)
    if not right or not any(each.elements for each in outcomes):
        return blank
    why = f"the engine computes {prepared.model.text} rightly, beyond {bound.part}"
    return replace(blank, verdict=Verdict.TOO_NARROW, kernel=outcomes[0].kernel, detail=why)


def only_claim(backend: BackendConfig, trial: Trial, config: DTypeConfig) -> BackendConfig:
    """A description of the one claim, and of what its pattern becomes when it is fused.

    A batch norm folds into the layer before it: then the conditions of that layer hold.
    """
    own = backend.configs[trial.claim.entry]
    before = own.dtype_configs[trial.claim.config]
    entries = []
    for entry in (own, *(each for each in backend.configs if each is not own)):
        if before in entry.dtype_configs:
            kept = copy.copy(entry)
            kept.set_dtype_configs([config])
            entries.append(kept)
    made = BackendConfig(backend.name).set_engine(backend.engine)
    return made.set_backend_pattern_configs(entries)
