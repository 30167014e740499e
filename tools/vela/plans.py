"""What our plan says of one case: is the operator quantized, and if not, why?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tools.vela.cases import Case, Function

from backquant import MinMaxObserver, PerChannelMinMaxObserver, QConfig, QConfigMapping
from backquant.backend_config import BackendConfig
from backquant.graph import capture
from backquant.graph.shapes import GraphValues
from backquant.match import Outcome, Plan, make_plan

__all__ = ["planned"]

_WEIGHT = PerChannelMinMaxObserver.with_args(
    dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-127, quant_max=127
)
_ACTIVATIONS = {
    "int8": MinMaxObserver.with_args(dtype=torch.qint8),
    "int16": MinMaxObserver.with_args(dtype=torch.int16, qscheme=torch.per_tensor_symmetric),
}


def planned(case: Case, backends: Sequence[BackendConfig]) -> list[tuple[bool, str]]:
    """For each backend: is every operator of the case quantized, and what are the reasons against?

    Transposed convolutions have their channels on axis 1 of the weight.
    """
    weight = _WEIGHT
    if isinstance(case.module, torch.nn.ConvTranspose2d):
        weight = _WEIGHT.with_args(ch_axis=1)
    mapping = QConfigMapping().set_global(QConfig(_ACTIVATIONS[case.dtype], weight))
    whole = not isinstance(case.module, Function)  # a module of PyTorch's stays one in a model
    captured = capture((torch.nn.Sequential(case.module) if whole else case.module).eval())
    values = GraphValues(captured.module, tuple(map(torch.zeros, case.shapes)))
    module, scopes = captured.module, captured.scopes
    plans = (make_plan(module, scopes, each, mapping, values=values) for each in backends)
    return [_verdict(plan) for plan in plans]


def _verdict(plan: Plan) -> tuple[bool, str]:
    float_ones = [d for d in plan.decisions.values() if d.outcome is Outcome.FLOAT]
    reasons = (f"{r.asked}; admitted {r.admitted}" for d in float_ones for r in d.reasons[:1])
    return not float_ones, " | ".join(reasons)
