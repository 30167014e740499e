"""Operators together: what shares an observer, is read twice, is fused here and not there, is called twice.

Of each description a few: a weighted module with every operator behind it that the description has for its
dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    ObservationType,
)
from backquant.conformance.attempt import (
    Prepared,
    Setting,
    Steps,
    blank_outcome,
    calibrated,
    in_float,
    on_admitted,
    prepared_module,
)
from backquant.conformance.bounds import admitted
from backquant.conformance.data import drawn_ranges
from backquant.conformance.models import FloatModel, Input
from backquant.conformance.results import Claim, Trial, Verdict, dtypes_text
from backquant.conformance.samples import asked_for, drawn_sample, sample_text
from backquant.dtypes import is_quantized
from backquant.errors import BackquantError
from backquant.operators import find
from backquant.operators.operator import Operator, build_module
from backquant.prepare import prepared_state
from backquant.reason_codes import ReasonCode

Joined = Callable[[nn.Module, nn.Module, Tensor, Tensor], Tensor]
_SHARES = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
#: Modules whose results have the shape of a record, and that an addition of two of them takes.
_PRODUCERS = ("conv", "linear")


@dataclass(frozen=True)
class Combination:
    """``of``: two modules and two inputs to a result. ``behind``: the operators that the description has to
    have, each of which may add what it is off by. ``once``: one module is called twice. ``read``: a module
    reads the result, and gives the same."""

    of: Joined
    behind: tuple[Any, ...]
    once: bool = False
    read: bool = False


def _read_twice(one: nn.Module, other: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The first result is read as it is, too, so that it cannot be fused with its ReLU."""
    made = one(x)
    return torch.add(torch.add(F.relu(made), made), other(y))


COMBINATIONS: dict[str, Combination] = {
    "cat of two": Combination(
        lambda one, other, x, y: torch.cat([one(x), other(y)], 1), (torch.cat,)
    ),
    "sum of two": Combination(lambda one, other, x, y: torch.add(one(x), other(y)), (torch.add,)),
    "sum of one called twice": Combination(
        lambda one, other, x, y: torch.add(one(x), other(y)), (torch.add,), once=True
    ),
    "cat of one called twice": Combination(
        lambda one, other, x, y: torch.cat([one(x), other(y)], 1), (torch.cat,), once=True
    ),
    "one with a ReLU and one without": Combination(
        lambda one, other, x, y: torch.add(F.relu(one(x)), other(y)), (F.relu, torch.add)
    ),
    "read with a ReLU and without": Combination(_read_twice, (F.relu, torch.add, torch.add)),
    "moved before they are joined": Combination(
        lambda one, other, x, y: torch.cat(
            [torch.flatten(one(x), 1), torch.flatten(other(y), 1)], 1
        ),
        (torch.flatten, torch.flatten, torch.cat),
    ),
}
#: The same between operators on integers, for descriptions that quantize them only there.
_READ = {f"{name}, and read": replace(each, read=True) for name, each in COMBINATIONS.items()}


class _Pair(nn.Module):
    """The model: ``one`` and ``other``, which may be the same module."""

    def __init__(self, one: nn.Module, other: nn.Module, of: Joined) -> None:
        super().__init__()
        self.one, self.other, self._of = one, other, of
        self.reader: nn.Module | None = None

    def joined(self, x0: Tensor, x1: Tensor) -> Tensor:
        return self._of(self.one, self.other, x0, x1)

    def forward(self, x0: Tensor, x1: Tensor) -> Tensor:
        made = self.joined(x0, x1)
        return made if self.reader is None else self.reader(made)


def _reader(kind: type[nn.Module], made: Tensor) -> nn.Module | None:
    """A module of this kind that gives what it is given, tensors as ``made``, if it takes their rank."""
    if not issubclass(kind, nn.Linear) and made.dim() < 3:
        return None
    module: nn.Module
    if issubclass(kind, nn.Linear):
        module = kind(made.shape[-1], made.shape[-1])
        nn.init.eye_(module.get_parameter("weight"))
    else:
        module = kind(made.shape[1], made.shape[1], 1)
        nn.init.dirac_(module.get_parameter("weight"))
    nn.init.zeros_(module.get_parameter("bias"))
    return module


def combinations(backend: BackendConfig) -> Iterator[Claim]:
    """The combinations that a description admits, as claims of the entry of their module.

    >>> from backquant.backend_config import get_backend_config
    >>> [claim.pattern for claim in combinations(get_backend_config("x86"))][:2]
    ['cat of two torch.nn.Conv1d', 'sum of two torch.nn.Conv1d']
    """
    for at, entry in enumerate(backend.configs):
        operator = _producer(entry)
        if operator is None:
            continue
        for position, config in enumerate(entry.dtype_configs):
            if not is_quantized(config.output_dtype) or config.is_dynamic:
                continue
            for name, combination in COMBINATIONS.items():
                if all(_admits(backend, op, config) for op in combination.behind):
                    read = ", and read" if _only_between(backend, combination.behind[-1]) else ""
                    text = f"{name}{read} {entry.normal_pattern}"
                    yield Claim(at, position, text, dtypes_text(config), name + read)


def _only_between(backend: BackendConfig, op: Any) -> bool:
    """Whether ``op`` stays float where no operator on integers reads what it computes."""
    rules = () if backend.qdq is None else backend.qdq.leave_float
    return any(rule.unless_between_quantized and op in rule.operators for rule in rules)


def _producer(entry: BackendPatternConfig) -> Operator | None:
    """The operator of an entry for one weighted module in its float form."""
    pattern = entry.normal_pattern
    op = pattern.anchor.op
    if pattern.size != 1 or not isinstance(op, type):
        return None
    operator = find(op)
    known = operator is not None and op in operator.modules and operator.family in _PRODUCERS
    return operator if known else None


def _admits(backend: BackendConfig, op: Any, config: DTypeConfig) -> bool:
    """Whether ``op`` by itself takes and gives what ``config`` gives."""
    wanted = config.output_dtype_with_constraints
    return any(
        entry.normal_pattern.size == 1
        and entry.normal_pattern.anchor.op is op
        and any(
            each.input_dtype_with_constraints == wanted
            and each.output_dtype_with_constraints == wanted
            and not each.is_dynamic
            for each in entry.dtype_configs
        )
        and (op is not torch.cat or entry.observation_type is _SHARES)
        for entry in backend.configs
    )


def combined_model(trial: Trial, backend: BackendConfig, again: int = 0) -> FloatModel:
    """The float model of a combination, drawn so often before; two modules have weights of their own."""
    entry, config = trial.claim.of(backend)
    combination = {**COMBINATIONS, **_READ}[trial.claim.together]
    operator = find(entry.normal_pattern.anchor.op)
    assert operator is not None
    sample = admitted(entry, config, backend, operator) or operator.sample
    if trial.number or again:
        sample = drawn_sample(operator, trial.again(again))
    one = build_module(entry.normal_pattern.anchor.op, sample).module
    other = one if combination.once else build_module(entry.normal_pattern.anchor.op, sample).module
    if other is not one:
        with torch.no_grad():
            for parameter in other.parameters():  # equal biases would be one constant of an export
                parameter.neg_()
    pair = _Pair(one, other, combination.of)
    if combination.read:
        made = pair.joined(*[torch.zeros(sample.shapes[0])] * 2)
        pair.reader = _reader(entry.normal_pattern.anchor.op, made)
    inputs = [Input(sample.shapes[0])] * 2
    operators = (operator, *(find(op) for op in combination.behind))
    behind = len(combination.behind) + combination.read
    traced = fx.symbolic_trace(pair).eval()
    return FloatModel(traced, inputs, sample_text(sample), operators=operators, behind=behind)


def together(trial: Trial, setting: Setting) -> Steps:
    """The outcomes of a combination: all of it runs on integers, and equals the reference."""
    _, config = trial.claim.of(setting.backend)
    blank = blank_outcome(trial, setting)

    def drawn(again: int) -> Prepared:
        return _prepared(trial, setting, config, again)

    try:
        prepared = drawn(0)
    except (BackquantError, RuntimeError) as error:
        yield replace(blank, verdict=Verdict.UNPREDICTABLE, detail=str(error)[:300])
        return
    blank = replace(blank, use=f"{prepared.model.text}, {', '.join(prepared.ranges)}")
    plan = prepared_state(prepared.module).plan
    refusal = in_float(plan)
    if refusal is not None:
        conditions = {r.rule for d in plan.decisions.values() for r in d.reasons}
        verdict = Verdict.UNTRIED if ReasonCode.CONDITION in conditions else Verdict.UNPREDICTABLE
        yield replace(blank, verdict=verdict, detail=refusal)
        return
    if not _shares(prepared.module):
        why = "the tensors that are joined have observers of their own"
        yield replace(blank, verdict=Verdict.UNPREDICTABLE, detail=why)
        return
    yield from on_admitted(trial, setting, prepared, drawn, config, blank)


def _prepared(trial: Trial, setting: Setting, config: DTypeConfig, again: int) -> Prepared:
    """The calibrated model of a combination, drawn so often before."""
    choice = trial.again(again) if trial.number or again else None
    model = combined_model(trial, setting.backend, again)
    request = asked_for(config, model.operators[0], choice)
    ranges = drawn_ranges(2, trial.again(again, "ranges"), trial.number + again)
    module = prepared_module(model, request, setting.backend, config)
    return calibrated(Prepared(model, request, ranges, module), trial)


def _shares(prepared: fx.GraphModule) -> bool:
    """Whether all that is joined, and the result, are under one observer: integers are copied then."""
    for node in prepared.graph.nodes:
        if node.target is torch.cat:
            read = [*node.all_input_nodes, *node.users]
            called = [each for each in read if each.op == "call_module"]
            observers = {id(prepared.get_submodule(str(each.target))) for each in called}
            if len(called) < len(read) or len(observers) > 1:
                return False
    return True
