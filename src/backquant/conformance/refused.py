"""The other side of a claim: what lies beyond it is refused, for that reason; and does the engine take it?"""

from __future__ import annotations

import copy
from collections.abc import Generator
from dataclasses import replace

import torch

from backquant.backend_config import BackendConfig, DTypeConfig
from backquant.conformance.attempt import (
    Prepared,
    Setting,
    Steps,
    blank_outcome,
    calibrated,
    on_engine,
    prepared_module,
)
from backquant.conformance.case import Outcome, Trial, Verdict
from backquant.conformance.data import drawn_ranges
from backquant.conformance.edges import Edge, edges_of
from backquant.conformance.models import FloatModel, NoExampleError, float_model, float_pattern
from backquant.conformance.refusals import reason_text
from backquant.conformance.requests import asked_for
from backquant.conformance.seam import Answer, Build
from backquant.errors import BackquantError
from backquant.match import Plan
from backquant.match.plan import Decision
from backquant.match.plan import Outcome as PlanOutcome
from backquant.prepare import prepared_state


def beyond(trial: Trial, setting: Setting) -> Steps:
    """An outcome for each demand of the claim: what is one step outside of it is refused, and named."""
    entry = setting.backend.configs[trial.claim.entry]
    config = entry.dtype_configs[trial.claim.config]
    try:
        model = float_model(entry, setting.backend, None, setting.examples, config)
    except NoExampleError:
        return
    if model.trained and _of_floats(setting.backend, config):
        return  # the same dtype config, of the same float modules
    asked = asked_for(config, next(iter(model.operators), None), None, trained=model.trained)
    alone = only(setting.backend, config, config)
    for edge in edges_of(config, asked):
        blank = replace(
            blank_outcome(trial, setting),
            case=f"{trial.claim} beyond: {edge.name}",
            use=f"{model.text}, {edge.name}",
        )
        setting.at(blank.case)
        try:
            module = prepared_module(model, edge.request, alone, config)
        except (BackquantError, RuntimeError, ValueError) as error:
            yield replace(blank, detail=f"no observer: {error}"[:200])
            continue
        plan = prepared_state(module).plan
        if not plan.matches:
            why = "nothing matches what the pattern is fused into: it is claimed for other dtypes"
            yield replace(
                blank, case=f"{trial.claim} fused", verdict=Verdict.UNPREDICTABLE, detail=why
            )
            return
        if all(d.outcome is PlanOutcome.NOT_TENSOR for d in _decisions(plan)):
            return  # it has no tensor to quantize, which the accepted side says
        taken = [d for d in _decisions(plan) if d.quantized]
        if taken:
            why = f"{edge.name} is beyond the claim, and the plan takes it"
            yield replace(blank, verdict=Verdict.UNPREDICTABLE, detail=why)
            continue
        said = "; ".join(reason_text(decision) for decision in _decisions(plan))
        if not _names(said, edge):
            why = f"refused for another reason than {edge.name}: {said}"
            yield replace(blank, verdict=Verdict.UNPREDICTABLE, detail=why[:300])
            continue
        if _admitted_elsewhere(trial, setting, edge, model):
            yield blank
            continue
        yield (yield from _asked_past(trial, setting, edge, blank))


def _of_floats(backend: BackendConfig, config: DTypeConfig) -> bool:
    """Whether an entry of float modules claims ``config``, too: there it is tried."""
    others = (entry for entry in backend.configs if config in entry.dtype_configs)
    return any(not float_pattern(entry, backend)[1] for entry in others)


def _admitted_elsewhere(trial: Trial, setting: Setting, edge: Edge, model: FloatModel) -> bool:
    """Whether another dtype config of the entry admits what this one refuses."""
    entry = setting.backend.configs[trial.claim.entry]
    if len(entry.dtype_configs) == 1:
        return False
    config = entry.dtype_configs[trial.claim.config]
    module = prepared_module(model, edge.request, setting.backend, config)
    return all(decision.quantized for decision in _decisions(prepared_state(module).plan))


def _decisions(plan: Plan) -> list[Decision]:
    return [plan.decisions[match.anchor] for match in plan.matches]


def _names(said: str, edge: Edge) -> bool:
    """Whether a reason is about the tensor of the edge (of activations: as input or as output)."""
    activations = ("activation", "input", "output", "dynamic")
    roles = (edge.role,) if edge.role == "weight" else activations
    return any(role in said for role in roles)


def only(backend: BackendConfig, config: DTypeConfig, instead: DTypeConfig) -> BackendConfig:
    """``backend`` with nothing but ``config``, which becomes ``instead``.

    >>> from backquant.backend_config import get_backend_config
    >>> x86 = get_backend_config("x86")
    >>> static = x86.configs[0].dtype_configs[0]
    >>> {len(entry.dtype_configs) for entry in only(x86, static, static).configs}
    {1}
    """
    entries = []
    for entry in backend.configs:
        if config in entry.dtype_configs:
            kept = copy.copy(entry)
            kept.set_dtype_configs([instead])
            entries.append(kept)
    made = BackendConfig(backend.name).set_engine(backend.engine).set_qdq(backend.qdq)
    return made.set_backend_pattern_configs(entries)


def _asked_past(
    trial: Trial, setting: Setting, edge: Edge, blank: Outcome
) -> Generator[Outcome | Build, Answer, Outcome]:
    """The engine is asked with a description that admits it: whether it computes it, and rightly."""
    entry = setting.backend.configs[trial.claim.entry]
    config = entry.dtype_configs[trial.claim.config]
    wide = only(setting.backend, config, edge.widened)
    made = float_model(entry, setting.backend, None, setting.examples, config)
    ranges = drawn_ranges(len(made.inputs), trial.choice(), 0)
    if edge.of_small_scales and edge.role == "weight":
        made = _with_small_weights(made)
    elif edge.of_small_scales:
        ranges = ["narrow"] * len(ranges)
    try:
        module = prepared_module(made, edge.request, wide, edge.widened)
        prepared = calibrated(Prepared(made, edge.request, ranges, module), trial)
    except (BackquantError, RuntimeError, ValueError):
        return blank
    if not all(d.quantized for d in _decisions(prepared_state(module).plan)):
        return blank
    past = replace(setting, backend=wide)
    outcomes = yield from kept(on_engine(trial, past, prepared, edge.widened, blank))
    right = bool(outcomes) and all(each.verdict is Verdict.CONFORMS for each in outcomes)
    if not right or not any(each.elements for each in outcomes):
        return blank
    why = f"the engine computes {edge.name} rightly"
    return replace(blank, verdict=Verdict.TOO_NARROW, kernel=outcomes[0].kernel, detail=why)


def _with_small_weights(model: FloatModel) -> FloatModel:
    """``model`` with weights of some hundredths: on the grid of the least scale, and not all of them 0."""
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point() and "running" not in name:
                tensor.mul_(0.03)
    return replace(model, module=module)


def kept(steps: Steps) -> Generator[Outcome | Build, Answer, list[Outcome]]:
    """The outcomes of ``steps``, as a list; what is asked of the engine is passed on."""
    outcomes = []
    item = next(steps, None)
    while item is not None:
        if isinstance(item, Outcome):
            outcomes.append(item)
            item = next(steps, None)
            continue
        answer = yield item
        try:
            item = steps.send(answer)
        except StopIteration:
            break
    return outcomes
