"""Try whether a plan quantizes an operator whose QConfig is made from a dtype config of its entry.

The graph holds only the example of the operator's record (``backquant.operators``). Conditions of the
entry, and weights in groups, depend on shapes and are left out. Patterns of several operators, and
operators without a record, are not tried. A dtype for a tensor that the operator does not have is
reported first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache

from torch import nn

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    ObservationType,
)
from backquant.dtypes import dtype_name, is_quantized
from backquant.errors import CaptureError
from backquant.graph import Captured, capture
from backquant.match.decide import make_plan
from backquant.match.plan import Decision
from backquant.operators import find
from backquant.qconfig import QConfig, QConfigMapping

_WITH_WEIGHTS = ("recurrent", "embedding", "attention")
_GROUPS = ("per_group", "per_block")


def plan_refusal(entry: BackendPatternConfig, config: DTypeConfig, asked: QConfig) -> str:
    """Why the plan leaves the operator of ``entry`` in float; empty where it does not."""
    pattern = entry.normal_pattern
    contradiction = _contradiction(entry, config) if pattern.size == 1 else ""
    if contradiction:
        return contradiction
    demands = (config.weight_dtype_with_constraints, config.input_dtype_with_constraints)
    grouped = any((demand.granularity or "").startswith(_GROUPS) for demand in demands)
    captured = _example(pattern.anchor.op) if pattern.size == 1 else None
    if captured is None or grouped:
        return ""
    alone = copy.copy(entry)
    alone.where = None
    alone.set_dtype_configs([config])
    backend = BackendConfig("tried").set_backend_pattern_config(alone)
    mapping = QConfigMapping().set_global(asked)
    plan = make_plan(captured.module, captured.scopes, backend, mapping)
    decisions = [plan.decisions[match.anchor] for match in plan.matches]
    return next(filter(None, (_said(each) for each in decisions if not each.quantized)), "")


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
    model: Callable[..., object] | nn.Module = operator.example_of(spelling)[0]
    if not isinstance(model, nn.Module):
        return None
    try:
        return capture(model)
    except CaptureError:
        return None


def _said(decision: Decision) -> str:
    reason = decision.reasons[-1] if decision.reasons else None
    if reason is None:  # the operator has no tensor to quantize
        return ""
    return f"{decision.operator} alone stays float: {reason.asked}; admitted is {reason.admitted}"
