"""Find dtype configs of a backend that no QConfig can satisfy, and operators that the default request leaves
in float.

For each dtype config a QConfig is made from its own constraints and checked against it. The dtype config is
``unsatisfiable`` where no observer gives the dtype, where its constraints refuse the very observer that they
ask for, or where the plan leaves the operator in float even so (``backquant.match.satisfiable``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    ObservationType,
    is_for_inference_only,
)
from backquant.backend_config.conditions import AllOf, condition_from, conjuncts, contradictions
from backquant.backend_config.dtype_rules import Place
from backquant.backend_config.naming import operator_name
from backquant.backend_config.pattern import NormalPattern, part_of
from backquant.backend_config.validate import Finding, generalizes
from backquant.dtypes import Granularity, dtype_name, find_dtype, is_quantized
from backquant.errors import BackquantError, CaptureError, ConfigError, SpecError
from backquant.graph import Captured, capture
from backquant.graph.arguments import argument_counts
from backquant.match.decide import make_plan
from backquant.match.fixes import qconfig_fix, unconditional
from backquant.match.plan import Decision
from backquant.match.roles import sums_axis
from backquant.match.rules import QConfigReader
from backquant.match.verdict import QConfigRequest, Roles, judge
from backquant.operators import find
from backquant.qconfig import QConfig, QConfigMapping, get_default_qconfig_mapping
from backquant.reason_codes import ReasonCode


def unsatisfiable(backend: BackendConfig) -> list[Finding]:
    """An error for each dtype config that no request satisfies.

    >>> entry = BackendPatternConfig(torch.add).add_dtype_config(DTypeConfig(torch.float8_e8m0fnu))
    >>> [finding] = unsatisfiable(BackendConfig("b").set_backend_pattern_config(entry))
    >>> finding.rule, finding.message
    ('unsatisfiable', 'no request satisfies it: input float8_e8m0fnu, which nothing here quantizes to')
    """
    found: list[Finding] = []
    known: dict[str, _Why] = {}
    for index, (pattern, entry) in enumerate(backend.shared_entries.items()):
        for position, config in enumerate(entry.dtype_configs):
            place = Place(index, str(pattern)).at(f"dtype_configs[{position}]")
            key = repr(config)
            if key not in known:
                known[key] = next(_refused(config), _NOTHING)
            why = known[key] or _grouped(entry, config) or _in_a_plan(entry, config)
            if why:
                here = place.at(why.field) if why.field else place
                message = f"no request satisfies it: {why.text}"
                found.append(here.find("error", "unsatisfiable", message, why.fix))
    return found


def left_float_by_default(backend: BackendConfig) -> list[Finding]:
    """A note for each operator that the mapping of who asks for nothing leaves in float, by its dtypes.

    >>> from backquant.backend_config import BackendDefaults, QuantDefault
    >>> int8, int16 = (DTypeConfig(dtype, dtype) for dtype in (torch.qint8, torch.int16))
    >>> entries = [BackendPatternConfig(op) for op in (torch.add, torch.mul)]
    >>> entries = [e.add_dtype_config(c) for e, c in zip(entries, (int8, int16))]
    >>> defaults = BackendDefaults(QuantDefault("minmax", torch.qint8), QuantDefault("noop"))
    >>> mine = BackendConfig("b").set_backend_pattern_configs(entries).set_defaults(defaults)
    >>> [(finding.entry, finding.rule) for finding in left_float_by_default(mine)]
    [(1, 'float-by-default')]
    """
    try:
        mapping = get_default_qconfig_mapping(backend)
    except (ConfigError, SpecError):  # there is no default
        return []
    found: list[Finding] = []
    for index, (pattern, entry) in enumerate(backend.shared_entries.items()):
        alone = BackendConfig(backend.name).set_defaults(backend.defaults)
        floats = _tried(entry, entry.dtype_configs, alone, mapping) if entry.dtype_configs else []
        reasons = (reason for each in floats for reason in each.reasons[-1:])
        for reason in (each for each in reasons if each.rule in _OF_REQUESTS):
            message = f"the default request leaves it in float: {reason.asked}; admitted is {reason.admitted}"
            fix = "defaults: {overrides: [{operators: …}]} with what is admitted, or nothing to do"
            found.append(Place(index, str(pattern)).find("note", "float-by-default", message, fix))
    return found


# Patterns that no graph holds: a call has more arguments than the pattern lists, or what another entry
# fuses is gone before this one is tried.


def never_matched(backend: BackendConfig) -> list[Finding]:
    """An error for each pattern of several operators that matches nothing.

    >>> entry = BackendPatternConfig((nn.Conv2d, torch.add)).add_dtype_config(DTypeConfig(torch.qint8))
    >>> [finding] = never_matched(BackendConfig("b").set_backend_pattern_config(entry))
    >>> finding.rule, finding.message
    ('never-matches', 'torch.add takes at least 2 arguments, and the pattern lists 1: nothing matches it')
    """
    entries = backend.shared_entries
    fused: dict[Any, list[NormalPattern]] = {}
    for pattern, entry in entries.items():
        if entry.fuser_method is not None and not is_for_inference_only(entry.fuser_method):
            fused.setdefault(pattern.anchor.op, []).append(pattern)
    found: list[Finding] = []
    for index, (pattern, entry) in enumerate(entries.items()):
        why = _too_few(pattern) or (
            _fused_before(pattern, fused) if _is_for_graphs(entry) else None
        )
        if why is not None:
            message, fix = f"{why.text}: nothing matches it", why.fix
            place = Place(index, str(pattern)).at("pattern")
            found.append(place.find("error", "never-matches", message, fix))
    return found


def _is_for_graphs(entry: BackendPatternConfig) -> bool:
    """Whether it is tried after fusion: it has no fuser itself, and says what is quantized."""
    return entry.fuser_method is None and bool(entry.dtype_configs)


def _too_few(pattern: NormalPattern) -> _Why | None:
    for node in pattern.nodes:
        counts = None if node.inputs is None else argument_counts(node.op)
        if counts is not None and len(node.inputs or ()) < counts.start:
            text = (
                f"{operator_name(node.op)} takes at least {counts.start} arguments, and the pattern lists "
                f"{len(node.inputs or ())}"
            )
            fix = f"{_by_names(pattern)}, or MatchAllNode for each other argument"
            return _Why(text, fix=fix)
    return None


def _fused_before(
    pattern: NormalPattern, fused: Mapping[Any, Sequence[NormalPattern]]
) -> _Why | None:
    for position, node in enumerate(pattern.nodes[:-1]):
        if node.inputs is None:
            continue
        part = part_of(pattern, position)
        first = next((each for each in fused.get(node.op, ()) if generalizes(each, part)), None)
        if first is not None:
            text = f"{first} is fused before, by an entry of its own"
            return _Why(text, fix=f"{_by_names(pattern)}, or the fused module in its place")
    return None


def _by_names(pattern: NormalPattern) -> str:
    known = [find(node.op) for node in pattern.nodes if node.kind not in ("any", "literal")]
    return f"operators: [{'+'.join('…' if each is None else each.name for each in known)}]"


class _Why(NamedTuple):
    """Why nothing satisfies a dtype config, about which field of it, and what to do."""

    text: str
    field: str = ""
    fix: str = "remove the combination, or what contradicts it"

    def __bool__(self) -> bool:
        return bool(self.text)


_NOTHING = _Why("")


def _refused(config: DTypeConfig) -> Iterator[_Why]:
    """Why ``config`` refuses the QConfig that was made from its own constraints."""
    for role in ("input", "output", "weight"):
        dtype = getattr(config, f"{role}_dtype")
        if dtype not in (None, torch.float32, torch.float64) and find_dtype(dtype) is None:
            text = f"{role} {dtype_name(dtype)}, which nothing here quantizes to"
            yield _Why(text, f"{role}_dtype", "a dtype of backquant.dtypes.known_dtypes()")
        row = None if dtype is None or role == "weight" else find_dtype(dtype)
        shared = getattr(config, f"{role}_dtype_with_constraints").granularity or ""
        in_blocks = config.is_dynamic and shared.startswith(("per_group", "per_block"))
        if row is not None and row.packed and not in_blocks:
            text = f"{role} {dtype_name(dtype)}, which only weights are quantized to"
            yield _Why(text, f"{role}_dtype", f"{role}_dtype: int8")
    weighted = config.weight_dtype is not None
    roles = Roles(activation=True, weight=weighted, bias=weighted)
    entry = BackendPatternConfig(torch.add).set_dtype_configs([unconditional(config)])
    try:
        requests = _request(config, roles)
    except (BackquantError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        yield _Why(str(error).splitlines()[0])
        return
    ruling = judge(entry, requests, roles)
    for role, refusal in ruling.refused[0] if ruling.refused else ():
        yield _Why(f"{role} {refusal.asked} is not {refusal.admitted}", f"{role}_dtype")


def _grouped(entry: BackendPatternConfig, config: DTypeConfig) -> _Why:
    """The condition that excludes every group size of the weight, in words; empty where there is none."""
    asked = config.weight_dtype_with_constraints.granularity
    shared = Granularity.parse(asked) if asked else None
    if shared is None or shared.size is None:
        return _NOTHING
    operator = find(entry.normal_pattern.anchor.op)
    implied: dict[str, Any] = {"group_size": shared.size}
    if operator is not None and operator.name == "linear" and shared.lies_on_rows:
        implied["in_channels"] = {"multiple_of": shared.size}
    parts = (conjuncts(each) for each in (entry.where, config.where, condition_from(implied)))
    excluded = next(contradictions(AllOf(tuple(chain(*parts)))), "")
    if not excluded:
        return _NOTHING
    text = f"groups of {shared.size}: {excluded}"
    return _Why(text, "weight_dtype.granularity", "a size that the conditions admit")


def _in_a_plan(entry: BackendPatternConfig, config: DTypeConfig) -> _Why:
    """Why the plan refuses what ``config`` asks for; empty where it does not."""
    weighted = config.weight_dtype is not None
    axis = sums_axis(entry.normal_pattern.anchor.op)
    roles = Roles(activation=True, weight=weighted, bias=weighted, sums_axis=axis)
    plain = unconditional(config)
    asked = qconfig_fix(plain, QConfigRequest(None, None), roles).make()
    return _Why(plan_refusal(entry, plain, asked))


def _request(config: DTypeConfig, roles: Roles) -> QConfigRequest:
    """What the fix of a refusal would ask for."""
    qconfig = qconfig_fix(config, QConfigRequest(None, None), roles).make()
    reader = QConfigReader()
    weight = reader.weight(qconfig, "check") if roles.weight else None
    output = reader.output(qconfig, "check")
    return QConfigRequest(reader.activation(qconfig, "check"), weight, output)


# Try whether a plan quantizes an operator whose QConfig is made from a dtype config of its entry.
#
# The graph holds only the example of the operator's record (``backquant.operators``). Conditions of the
# entry, and weights in groups, depend on shapes and are left out. Patterns of several operators, and
# operators without a record, are not tried. A dtype for a tensor that the operator does not have is
# reported first.

_WITH_WEIGHTS = ("recurrent", "embedding", "attention")
_GROUPS = ("per_group", "per_block")
_OF_REQUESTS = frozenset(
    {
        *(ReasonCode.DTYPE, ReasonCode.DTYPE_TOKEN, ReasonCode.DYNAMIC, ReasonCode.QUANT_RANGE),
        *(ReasonCode.SCALE_MIN, ReasonCode.FIXED_QPARAMS, ReasonCode.SYMMETRIC),
        *(ReasonCode.GRANULARITY, ReasonCode.CH_AXIS, ReasonCode.NO_OBSERVER),
    }
)


def plan_refusal(entry: BackendPatternConfig, config: DTypeConfig, asked: QConfig) -> str:
    """Why the plan leaves the operator of ``entry`` in float; empty where it does not."""
    contradiction = _contradiction(entry, config) if entry.normal_pattern.size == 1 else ""
    if contradiction:
        return contradiction
    mapping = QConfigMapping().set_global(asked)
    floats = _tried(entry, [config], BackendConfig("tried"), mapping)
    return next(filter(None, map(_said, floats)), "")


def _tried(
    entry: BackendPatternConfig,
    configs: Sequence[DTypeConfig],
    backend: BackendConfig,
    mapping: QConfigMapping,
) -> list[Decision]:
    """What the plan leaves in float of the operator of ``entry``, the only one that ``backend`` then has."""
    pattern = entry.normal_pattern
    demands = [
        d
        for c in configs
        for d in (c.weight_dtype_with_constraints, c.input_dtype_with_constraints)
    ]
    grouped = any((demand.granularity or "").startswith(_GROUPS) for demand in demands)
    captured = _example(pattern.anchor.op) if pattern.size == 1 else None
    if captured is None or grouped:
        return []
    alone = copy.copy(entry)
    alone.where = None
    alone.set_dtype_configs(map(unconditional, configs))
    backend.set_backend_pattern_config(alone)
    plan = make_plan(captured.module, captured.scopes, backend, mapping)
    decisions = [plan.decisions[match.anchor] for match in plan.matches]
    return [each for each in decisions if not each.quantized]


def _contradiction(entry: BackendPatternConfig, config: DTypeConfig) -> str:
    """What ``config`` says of a tensor that the operator of ``entry`` does not have (a weight of ``add``,
    say)."""
    spelling = entry.normal_pattern.anchor.op
    operator = find(spelling)
    given, output = config.input_dtype_with_constraints, config.output_dtype_with_constraints
    if entry.observation_type is ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT:
        if None not in (given.dtype, output.dtype) and given.dtype != output.dtype:
            names = f"{dtype_name(output.dtype)} beside {dtype_name(given.dtype)}"
            return f"the output shares the input's observer, and has another dtype: {names}"
        if (
            output.scale_exact_match is not None
            and output.scale_exact_match != given.scale_exact_match
        ):
            return (
                "the output shares the input's observer, and has a fixed scale that the input lacks"
            )
    if operator is None or not is_quantized(config.weight_dtype):
        return ""
    if not operator.is_weighted and operator.family not in _WITH_WEIGHTS:
        return f"weight {dtype_name(config.weight_dtype)}, and {operator.name} has no weight"
    place = entry._input_type_to_index.get("weight")
    if spelling in operator.functions and operator.weight_index not in (None, place):
        return (
            f"weight {dtype_name(config.weight_dtype)}, and input_type_to_index does not say that argument "
            f"{operator.weight_index} of {operator.name} is its weight"
        )
    return ""


@lru_cache(maxsize=1024)
def _example(spelling: object) -> Captured | None:
    operator = find(spelling)
    if operator is None or spelling not in operator.calls:
        return None
    model = operator.example_of(spelling)[0]
    try:
        return capture(nn.Sequential(model) if spelling in operator.modules else model)
    except CaptureError:
        return None


def _said(decision: Decision) -> str:
    reason = decision.reasons[-1] if decision.reasons else None
    if reason is None:  # the operator has no tensor to quantize
        return ""
    return f"{decision.operator} alone stays float: {reason.asked}; admitted is {reason.admitted}"
