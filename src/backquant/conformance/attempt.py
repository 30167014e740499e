"""One trial: a float model is quantized as the description says, and runs on the engine and as integers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from backquant.api import prepare_fx, prepare_qat_fx
from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    ObservationType,
)
from backquant.conformance.bounds import admitted
from backquant.conformance.data import (
    PROBES,
    Probe,
    calibration,
    called_with,
    drawn_ranges,
    input_grids,
    output_scale,
)
from backquant.conformance.engine_protocol import (
    Answer,
    Build,
    BuiltModel,
    ConformanceEngine,
    NotAskedError,
    RefusedByEngineError,
)
from backquant.conformance.models import Examples, FloatModel, NoExampleError, float_model
from backquant.conformance.results import Outcome, Trial, Verdict, trial_data
from backquant.conformance.rounded_once import (
    distance,
    references_behind,
    references_of_parts,
    with_seven_bits,
)
from backquant.conformance.samples import asked_for
from backquant.conformance.torch_engines import REFERENCE, TorchEngine, said, single
from backquant.convert import convert_to_reference, reference_state
from backquant.dtypes import is_quantized
from backquant.errors import BackquantError
from backquant.graph.silence import without_warnings
from backquant.lower.qdq import dynamic_input
from backquant.match import Plan, Reason
from backquant.match.fixes import QConfigFix
from backquant.match.plan import Decision
from backquant.match.plan import Outcome as PlanOutcome
from backquant.operators import find
from backquant.operators.operator import QParamsRule
from backquant.prepare import prepared_state
from backquant.qconfig import PrepareCustomConfig, QConfigMapping
from backquant.reason_codes import ReasonCode

# What a plan refuses, and why: before calibration, and once scales are known.


def refused_after_calibration(prepared: fx.GraphModule) -> Reason | None:
    """The reason of a rule of the description on measured scales; ``None`` where the plan holds.

    >>> import torch
    >>> from backquant.api import prepare_fx
    >>> from backquant.qconfig import get_default_qconfig_mapping
    >>> mapping = get_default_qconfig_mapping("qnnpack")
    >>> layer, example = torch.nn.Linear(4, 4), (torch.rand(2, 4),)
    >>> _ = torch.nn.init.constant_(layer.bias, -2.7)
    >>> model = torch.nn.Sequential(layer, torch.nn.ReLU())
    >>> prepared = prepare_fx(model, mapping, example, backend_config="qnnpack")
    >>> _ = prepared(*example)
    >>> print(refused_after_calibration(prepared).rule)
    bias-step
    """
    asked = {(one.node, one.rule) for one in prepared_state(prepared).plan.predicates}
    if not asked:
        return None
    plan = reference_state(convert_to_reference(prepared)).plan
    reasons = (reason for decision in plan.decisions.values() for reason in decision.reasons)
    return next((each for each in reasons if (each.node, each.rule) in asked), None)


def in_float(plan: Plan) -> str | None:
    """Why the plan leaves the operator in float; ``None`` where it does not."""
    decisions = [plan.decisions[match.anchor] for match in plan.matches]
    told = [reason_text(each) for each in decisions if not each.quantized]
    if told:
        return told[0]
    return None if decisions else "no entry of the description matches the operator"


def by_condition(plan: Plan) -> bool:
    """Whether the plan refuses a use for a condition of the entry."""
    decisions = [plan.decisions[match.anchor] for match in plan.matches]
    return any(r.rule == ReasonCode.CONDITION for each in decisions for r in each.reasons)


def no_tensor(decision: Decision) -> bool:
    """Whether an operator has no tensor to quantize."""
    return decision.outcome is PlanOutcome.NOT_TENSOR


def reason_text(decision: Decision) -> str:
    """Why an operator stays float."""
    if not decision.reasons:
        return f"{decision.operator} stays float, for no reason"
    last = decision.reasons[-1]
    return (
        f"{decision.operator} stays float: {last.rule}: {last.asked}; admitted is {last.admitted}"
    )


#: A trial on its way: outcomes as they come, and what the engine is asked to build, which is sent back built.
Steps = Generator[Outcome | Build, Answer, None]

#: How far results in float may be off where nothing is stated: sums in another order.
FLOAT_STEPS = 0.01
_DRAWS = 12  # of one trial, until its scales are admitted
_SAMPLES = 8  # calls that say what range results in float have


@dataclass(frozen=True)
class Setting:
    """What trials of one run share."""

    backend: BackendConfig
    engine: ConformanceEngine
    examples: Examples | None = None
    at: Callable[[str], None] = lambda _: None


@dataclass
class Prepared:
    """A trial on its way: the float model, the request, and the calibrated model."""

    model: FloatModel
    request: QConfigFix
    ranges: list[str]
    module: fx.GraphModule


def attempt(trial: Trial, setting: Setting) -> Steps:
    """The outcomes of a trial on the accepted side, one for each call that the float model takes."""
    entry, config = trial.claim.of(setting.backend)
    blank = blank_outcome(trial, setting)
    try:
        prepared = prepare(trial, setting, entry, config)
    except NoExampleError as error:
        if trial.number == 0:
            yield replace(blank, verdict=Verdict.UNTRIED, detail=str(error))
        return
    except BackquantError as error:
        yield replace(blank, verdict=Verdict.UNPREDICTABLE, detail=said(error))
        return
    blank = replace(blank, use=f"{prepared.model.text}, {', '.join(prepared.ranges)}")
    plan = prepared_state(prepared.module).plan
    if plan.matches and all(no_tensor(plan.decisions[m.anchor]) for m in plan.matches):
        if trial.number == 0:
            yield replace(blank, verdict=Verdict.UNTRIED, detail="it has no tensor to quantize")
        return
    if by_condition(plan):  # on both sides of it uses are tried by ``at_bounds``
        detail = f"a use that its condition does not admit: {in_float(plan)}"
        yield replace(blank, verdict=Verdict.UNTRIED, detail=detail)
        return
    if trial.number == 0 and _unshared(entry, setting.backend):
        why = (
            "its result lies on the grid of its input, and the description gives it one of its own"
        )
        yield replace(blank, verdict=Verdict.UNPREDICTABLE, detail=why)
    refusal = in_float(plan)
    if refusal is not None:
        yield replace(blank, verdict=Verdict.UNPREDICTABLE, detail=refusal)
        return

    def drawn(again: int) -> Prepared:
        return prepare(trial, setting, entry, config, again)

    yield from on_admitted(trial, setting, prepared, drawn, config, blank)


def on_admitted(
    trial: Trial,
    setting: Setting,
    prepared: Prepared,
    drawn: Callable[[int], Prepared],
    config: DTypeConfig,
    blank: Outcome,
) -> Steps:
    """``on_engine`` with ``prepared``, or the next draw that no rule on measured scales refuses."""
    rule = refused_after_calibration(prepared.module)
    for again in range(1, _DRAWS) if rule is not None else ():
        try:
            prepared = drawn(again)
        except (NoExampleError, BackquantError, RuntimeError):
            continue
        if in_float(prepared_state(prepared.module).plan) is not None:
            continue
        rule = refused_after_calibration(prepared.module)
        if rule is None:
            break
    if rule is not None:
        detail = f"{_DRAWS} draws, none admitted: {rule.rule}: {rule.asked}; {rule.admitted}"
        yield replace(blank, verdict=Verdict.UNTRIED, detail=detail)
        return
    blank = replace(blank, use=f"{prepared.model.text}, {', '.join(prepared.ranges)}")
    yield from on_engine(trial, setting, prepared, config, blank)


def blank_outcome(trial: Trial, setting: Setting) -> Outcome:
    """An outcome of ``trial`` of which nothing is known yet."""
    claim = trial.claim
    return Outcome(
        case=trial.key,
        pattern=claim.pattern,
        dtypes=claim.dtypes,
        side=trial.side,
        engine=setting.engine.name,
        verdict=Verdict.CONFORMS,
        trial=trial_data(trial),
    )


def prepare(
    trial: Trial,
    setting: Setting,
    entry: BackendPatternConfig,
    config: DTypeConfig,
    again: int = 0,
) -> Prepared:
    """The calibrated model of a trial, drawn so often before. Raises ``NoExampleError``."""
    choice = trial.again(again) if trial.number or again else None
    model = float_model(entry, setting.backend, choice, setting.examples, config)
    operator = next(iter(model.operators), None)
    if choice is None and operator is not None:
        sample = admitted(entry, config, setting.backend, operator)
        if sample is not None:
            model = float_model(entry, setting.backend, None, setting.examples, config, sample)
    request = asked_for(config, operator, choice, trained=model.trained)
    ranges = drawn_ranges(len(model.inputs), trial.again(again, "ranges"), trial.number + again)
    module = prepared_module(model, request, setting.backend, config)
    return calibrated(Prepared(model, request, ranges, module), trial)


def calibrated(prepared: Prepared, trial: Trial) -> Prepared:
    """``prepared``, whose observers have seen the whole of its ranges."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(trial.number)
        prepared.module(*calibration(prepared.model.inputs, prepared.ranges))
    return prepared


def prepared_module(
    model: FloatModel, request: QConfigFix, backend: BackendConfig, config: DTypeConfig
) -> fx.GraphModule:
    """The model with observers; its result is read as integers where the config quantizes it."""
    custom = PrepareCustomConfig()
    if _read_as_integers(config):
        custom.set_output_quantized_indexes([0])
    mapping = QConfigMapping().set_global(request.make())
    step = prepare_qat_fx if model.trained else prepare_fx
    with without_warnings(UserWarning):  # of what is skipped, which the plan has
        return step(model.module, mapping, model.example(), custom, backend_config=backend)


def _gives_integers(config: DTypeConfig) -> bool:
    return is_quantized(config.output_dtype) and not config.is_dynamic


def _read_as_integers(config: DTypeConfig) -> bool:
    """Signed results are read as floats on their grid: kernels for unsigned integers compute them, too."""
    return _gives_integers(config) and config.output_dtype in (torch.quint8, torch.uint8)


def _unshared(entry: BackendPatternConfig, backend: BackendConfig) -> bool:
    """Whether an operator that selects or moves values is observed as if it computed others. Averages do,
    where the description is of hardware with an arithmetic of its own."""
    operator = find(entry.normal_pattern.anchor.op) if entry.normal_pattern.size == 1 else None
    own = entry.observation_type is ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
    if not own or operator is None or operator.qparams is not QParamsRule.INPUT:
        return False
    return operator.moves_values or backend.engine is not None


def on_engine(
    trial: Trial,
    setting: Setting,
    prepared: Prepared,
    config: DTypeConfig,
    blank: Outcome,
) -> Steps:
    """A calibrated model is built by the engine, and called."""
    setting.at(trial.key)
    built = yield Build(prepared.module, prepared.model.example())
    if isinstance(built, RefusedByEngineError):
        left = isinstance(built, NotAskedError)
        said_so = Verdict.UNTRIED if left else Verdict.REFUSED_BY_ENGINE
        yield replace(blank, verdict=said_so, detail=str(built))
        return
    ran = built.ran
    blank = replace(blank, kernel=", ".join(ran.kernels))
    if ran.in_float and not _only_stored(config, prepared.model):
        why = "; ".join(f"{r.rule}: {r.asked}; {r.admitted}" for r in ran.in_float[:2])
        yield replace(blank, verdict=Verdict.NOT_INTEGER, detail=why)
        return
    references, exact = references_of(prepared.module)
    references += references_behind(ran.kernels, prepared.module)
    references += references_of_parts(ran.kernels, prepared.module)
    unit = output_scale(prepared.module) if _gives_integers(config) else None
    integers = _gives_integers(config)
    spread = 0.0 if integers else spread_of_results(trial, prepared)
    running = _Running(prepared, built, references, input_grids(prepared.module), unit, spread)
    limit = stated_steps(config, prepared.model, floats=not integers)
    blank = replace(blank, exact=exact and integers, limit=limit)
    for probe in PROBES if setting.engine.takes_sizes else PROBES[:5]:
        outcome = _called(trial, setting, running, probe, blank)
        if outcome is not None:
            yield outcome


def _only_stored(config: DTypeConfig, model: FloatModel) -> bool:
    """Whether a table is held in few bits, and rows of it are read as floats: nothing is computed."""
    families = {operator.family for operator in model.operators if operator is not None}
    return families == {"embedding"} and not is_quantized(config.output_dtype)


def stated_steps(config: DTypeConfig, model: FloatModel, *, floats: bool) -> float:
    """By how many steps results may be off. Operators that only move values must move them unchanged; of
    several operators in a row each may be off by what is stated for it.
    """
    moved = all(operator is not None and operator.moves_values for operator in model.operators)
    if config.tolerance is None or (moved and model.operators):
        return FLOAT_STEPS if floats else 0.0
    return float(config.tolerance.steps) * (1 + model.behind)


def references_of(prepared: fx.GraphModule) -> tuple[list[Any], bool]:
    """The integer reference, and True; where it has no arithmetic for a dtype, the reference model.

    What is quantized at each call has others: kernels for x86 may measure 7 bits of the 8 that are asked for,
    and leave the input of float16 weights in float32.
    """
    reference = convert_to_reference(prepared)
    others = (with_seven_bits(reference), with_float_inputs(reference))
    found: list[Any] = [each for each in others if each is not None]
    try:
        return [TorchEngine(REFERENCE).build(prepared, ()).model, *found], True
    except RefusedByEngineError:
        return [reference, *found], False


@dataclass(frozen=True)
class _Running:
    """A trial as it runs: on the engine, and as one of the references does. ``grids``: those of the inputs;
    ``unit``: the scale of the result; ``spread``: the range of results in float."""

    prepared: Prepared
    built: BuiltModel
    references: list[Any]
    grids: list[Tensor | None]
    unit: float | None
    spread: float


def spread_of_results(trial: Trial, prepared: Prepared) -> float:
    """How far from 0 the float operator's results are where its inputs have all of their range: a step of few
    results, of which a ReLU leaves next to nothing, is no step of what it computes."""
    model, widest = prepared.model, 0.0
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(trial.number)
        for values in ("any", "ends") * _SAMPLES:
            grids = [None] * len(model.inputs)
            try:
                out = single(
                    model.module.forward(
                        *called_with(Probe(values), model.inputs, prepared.ranges, grids)
                    )
                )
            except Exception:
                return widest
            out = out[torch.isfinite(out)].abs()
            widest = max(widest, float(out.max()) if out.numel() else 0.0)
    return widest


def _called(
    trial: Trial, setting: Setting, running: _Running, probe: Probe, blank: Outcome
) -> Outcome | None:
    """What came of one call; ``None`` where the float operator takes no such input."""
    prepared, blank = running.prepared, replace(blank, case=f"{blank.case}, {probe}")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(trial.choice(str(probe)).randrange(1 << 30))
        inputs = called_with(probe, prepared.model.inputs, prepared.ranges, running.grids)
        try:
            prepared.model.module.forward(*(x.clone() for x in inputs))
        except Exception:
            return None
        try:
            wanted = [
                single(each.forward(*(x.clone() for x in inputs))) for each in running.references
            ]
        except (BackquantError, RuntimeError) as error:
            if not blank.exact and not all(x.numel() for x in inputs):
                return None  # a scale measured at the call, of no values
            why = f"the reference fails: {said(error)}"
            return replace(blank, verdict=Verdict.UNPREDICTABLE, detail=why)
        setting.at(blank.case)
        try:
            found = running.built.run(inputs)
        except RefusedByEngineError as error:
            return replace(blank, verdict=Verdict.REFUSED_BY_ENGINE, detail=str(error))
    outcomes = [judged(found, each, blank, running.unit, running.spread) for each in wanted]
    return min(outcomes, key=lambda each: (bool(each.detail), each.steps))


def judged(
    found: Tensor, wanted: Tensor, blank: Outcome, unit: float | None, spread: float
) -> Outcome:
    """``blank`` with how far ``found`` is from ``wanted``."""
    off = distance(found, wanted, unit, spread)
    wrong = bool(off.what) or off.worst > blank.limit
    return replace(
        blank,
        verdict=Verdict.WRONG if wrong else Verdict.CONFORMS,
        steps=off.worst,
        elements=off.elements,
        different=off.different,
        detail=off.what,
    )


# The reference model of kernels whose weights are float16, and whose inputs stay float32.
#
# FBGEMM's do, where float16 is asked for at each call: a gate's sum of large inputs is off by its share
# of what they were rounded by, and a state that the gate holds near 0 by that part of itself.
def with_float_inputs(reference: fx.GraphModule) -> fx.GraphModule | None:
    """``reference`` without casts to a narrower float and back at each call; ``None`` if it has none.

    >>> import torch
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> half = graph.call_function(torch.ops.aten.to.dtype, (x, torch.float16))
    >>> _ = graph.output(graph.call_function(torch.ops.aten.to.dtype, (half, torch.float32)))
    >>> reference = fx.GraphModule(torch.nn.Module(), graph)
    >>> reference(torch.tensor([2049.0])), with_float_inputs(reference)(torch.tensor([2049.0]))
    (tensor([2048.]), tensor([2049.]))
    """
    made = copy.deepcopy(reference)
    changed = False
    for node in made.graph.nodes:
        cast = dynamic_input(node)
        if cast is not None and cast.dtype.is_floating_point:
            node.replace_all_uses_with(cast.source)
            changed = True
    if not changed:
        return None
    made.graph.eliminate_dead_code()
    made.recompile()
    return made
