"""The other side of a claim: what lies beyond it is refused, for that reason; and does the engine take it?"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
)
from backquant.conformance.attempt import (
    Prepared,
    Setting,
    Steps,
    blank_outcome,
    by_condition,
    calibrated,
    in_float,
    on_engine,
    prepared_module,
    reason_text,
)
from backquant.conformance.bounds import Bound, bounds_of, condition_of
from backquant.conformance.data import drawn_ranges
from backquant.conformance.engine_protocol import Answer, Build
from backquant.conformance.models import FloatModel, NoExampleError, float_model, float_pattern
from backquant.conformance.results import Outcome, Side, Trial, Verdict
from backquant.conformance.samples import asked_for
from backquant.dtypes import integer_range, is_quantized
from backquant.errors import BackquantError
from backquant.match import Plan
from backquant.match.fixes import ObserverFix, QConfigFix, unconditional
from backquant.match.plan import Decision
from backquant.match.plan import Outcome as PlanOutcome
from backquant.operators.operator import Operator
from backquant.prepare import prepared_state
from backquant.reason_codes import ReasonCode


def beyond(trial: Trial, setting: Setting) -> Steps:
    """An outcome for each demand of the claim: what is one step outside of it is refused, and named."""
    entry, config = trial.claim.of(setting.backend)
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
    entry, config = trial.claim.of(setting.backend)
    if len(entry.dtype_configs) == 1:
        return False
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
    made = _with_one_config(backend.name, backend.configs, config, instead)
    return made.set_engine(backend.engine).set_qdq(backend.qdq)


def _with_one_config(
    name: str, entries: Iterable[BackendPatternConfig], config: DTypeConfig, instead: DTypeConfig
) -> BackendConfig:
    """A description of the entries that have ``config``, each with ``instead`` alone."""
    made = BackendConfig(name)
    for entry in entries:
        if config in entry.dtype_configs:
            made.set_backend_pattern_config(copy.copy(entry).set_dtype_configs([instead]))
    return made


def _asked_past(
    trial: Trial, setting: Setting, edge: Edge, blank: Outcome
) -> Generator[Outcome | Build, Answer, Outcome]:
    """The engine is asked with a description that admits it: whether it computes it, and rightly."""
    entry, config = trial.claim.of(setting.backend)
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
    steps = on_engine(trial, replace(setting, backend=wide), prepared, edge.widened, blank)
    return (yield from too_narrow(steps, blank, f"the engine computes {edge.name} rightly"))


def _with_small_weights(model: FloatModel) -> FloatModel:
    """``model`` with weights of some hundredths: on the grid of the least scale, and not all of them 0."""
    module = copy.deepcopy(model.module)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point() and "running" not in name:
                tensor.mul_(0.03)
    return replace(model, module=module)


def too_narrow(
    steps: Steps, blank: Outcome, why: str
) -> Generator[Outcome | Build, Answer, Outcome]:
    """``blank``, or that the claim is too narrow, if all calls past it conform."""
    outcomes = yield from kept(steps)
    right = bool(outcomes) and all(each.verdict is Verdict.CONFORMS for each in outcomes)
    if not right or not any(each.elements for each in outcomes):
        return blank
    return replace(blank, verdict=Verdict.TOO_NARROW, kernel=outcomes[0].kernel, detail=why)


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


# One step outside of a dtype config: requests that it does not admit, each for one reason.
#
# Beside each stands the dtype config that would admit it, with which the engine is asked past the
# description.
_OTHER = {
    torch.quint8: torch.qint8,
    torch.qint8: torch.quint8,
    torch.uint8: torch.int8,
    torch.int8: torch.uint8,
    torch.float16: torch.bfloat16,
}
_ROLES = ("input", "output", "weight")


@dataclass(frozen=True)
class Edge:
    """``name``: what is asked beyond the claim, and of which tensor; ``widened`` admits it."""

    name: str
    role: str
    request: QConfigFix
    widened: DTypeConfig

    @property
    def of_small_scales(self) -> bool:
        """Whether it is seen only where values are so small that the scale is the least one asked for."""
        return "scale_min_lower_bound" in self.name


def edges_of(config: DTypeConfig, asked: QConfigFix) -> Iterator[Edge]:
    """What lies one step beyond ``config``; ``asked`` is what it admits.

    >>> from backquant.conformance.samples import asked_for
    >>> config = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
    >>> [edge.name for edge in edges_of(config, asked_for(config, None, None))]
    ['input dtype qint8', 'weight dtype quint8', 'at each call']
    """
    for role in _ROLES:
        demand: DTypeWithConstraints = getattr(config, f"{role}_dtype_with_constraints")
        if not is_quantized(demand.dtype):
            continue
        for field, value, fix in _beyond(demand, _observer(asked, role)):
            if role == "output" and not _its_own(config, field):
                continue
            name = f"{role} {field} {_text(value)}"
            yield Edge(name, role, _with(asked, role, fix), _widened(config, role, field, value))
    yield from _at_each_call(config, asked)


def _its_own(config: DTypeConfig, field: str) -> bool:
    """Whether a demand on outputs is another than that on inputs, so that it is seen by itself."""
    of_output, of_input = (
        getattr(config, f"{role}_dtype_with_constraints") for role in ("output", "input")
    )
    same: bool = getattr(of_output, field) == getattr(of_input, field)
    return of_output.dtype == of_input.dtype and not same


def _observer(asked: QConfigFix, role: str) -> ObserverFix:
    return asked.weight if role == "weight" else asked.activation


def _with(asked: QConfigFix, role: str, fix: ObserverFix) -> QConfigFix:
    return asked._replace(weight=fix) if role == "weight" else asked._replace(activation=fix)


def _text(value: Any) -> str:
    return str(value).removeprefix("torch.")


def _beyond(
    demand: DTypeWithConstraints, fix: ObserverFix
) -> Iterator[tuple[str, Any, ObserverFix]]:
    """Each demand on a tensor, one step further, and the observer that asks for that."""
    values = dict(fix.values or {})
    other = _OTHER.get(demand.dtype) if demand.dtype is not None else None
    low, high = integer_range(demand.dtype) or (0, 0)

    def step(field: str, value: Any, **more: Any) -> tuple[str, Any, ObserverFix]:
        return field, value, replace(fix, values={**values, **more})

    if fix.name == "FixedQParamsObserver":
        yield step("scale_exact_match", 2 * values["scale"], scale=2 * values["scale"])
    elif other is not None and "qscheme" not in str(values.get("granularity", "")):
        bare = {k: v for k, v in values.items() if k not in ("quant_min", "quant_max")}
        yield "dtype", other, replace(fix, values={**bare, "dtype": other})
    bound = demand.quant_min_lower_bound
    if bound is not None and bound > low:
        yield step("quant_min_lower_bound", bound - 1, quant_min=int(bound - 1))
    bound = demand.quant_max_upper_bound
    if bound is not None and bound < high:
        yield step("quant_max_upper_bound", bound + 1, quant_max=int(bound + 1))
    bound = demand.scale_min_lower_bound
    if bound is not None:
        yield step("scale_min_lower_bound", bound / 2, eps=bound / 2)
    if demand.symmetric and fix.name == "MinMaxObserver":
        yield step("symmetric", False, qscheme=torch.per_tensor_affine)


def _widened(config: DTypeConfig, role: str, field: str, value: Any) -> DTypeConfig:
    """``config`` with ``value`` for one demand; of activations, for inputs and outputs."""
    made = config.to_dict()
    for tensor in (role,) if role == "weight" else ("input", "output"):
        demand: DTypeWithConstraints = getattr(config, f"{tensor}_dtype_with_constraints")
        if not is_quantized(demand.dtype):
            continue
        kept = demand.to_dict()
        if field == "dtype":  # bounds are those of the dtype
            kept = {}
        made[f"{tensor}_dtype"] = DTypeWithConstraints(**{**kept, field: value})
    return DTypeConfig.from_dict(made)


def _at_each_call(config: DTypeConfig, asked: QConfigFix) -> Iterator[Edge]:
    """Quantized at each call where the claim is for scales known ahead."""
    if config.is_dynamic or not is_quantized(config.input_dtype) or config.weight_dtype is None:
        return
    placeholder = ObserverFix(
        "PlaceholderObserver", {"dtype": config.input_dtype, "is_dynamic": True}
    )
    given = {**config.to_dict(), "is_dynamic": True, "output_dtype": torch.float}
    yield Edge(
        "at each call",
        "input",
        asked._replace(activation=placeholder),
        DTypeConfig.from_dict(given),
    )


# Uses at the edges of conditions: at a bound they conform, just beyond they are refused, for that bound.


def at_bounds(trial: Trial, setting: Setting) -> Steps:
    """The outcomes at each bound of the conditions of a claim, and beyond it."""
    entry, config = trial.claim.of(setting.backend)
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
    _, config = trial.claim.of(setting.backend)
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
    _, config = trial.claim.of(setting.backend)
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
    return (yield from _quantized_past(trial, setting, bound, blank))


def _quantized_past(
    trial: Trial, setting: Setting, bound: Bound, blank: Outcome
) -> Generator[Outcome | Build, Answer, Outcome]:
    _, config = trial.claim.of(setting.backend)
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
    steps = on_engine(trial, replace(setting, backend=wide), prepared, free, blank)
    why = f"the engine computes {prepared.model.text} rightly, beyond {bound.part}"
    return (yield from too_narrow(steps, blank, why))


def only_claim(backend: BackendConfig, trial: Trial, config: DTypeConfig) -> BackendConfig:
    """A description of the one claim, and of what its pattern becomes when it is fused.

    A batch norm folds into the layer before it: then the conditions of that layer hold.
    """
    own, before = trial.claim.of(backend)
    entries = (own, *(each for each in backend.configs if each is not own))
    return _with_one_config(backend.name, entries, before, config).set_engine(backend.engine)
