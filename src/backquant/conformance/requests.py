"""The QConfig that a dtype config asks for: what a user would write to get it."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from backquant.backend_config import DTypeConfig
from backquant.dtypes import is_quantized
from backquant.match.fixes import ObserverFix, QConfigFix, qconfig_fix, unconditional
from backquant.match.verdict import QConfigRequest, Roles
from backquant.operators.operator import Operator

_MEASURING = ("MinMaxObserver", "PerChannelMinMaxObserver")


def asked_for(
    config: DTypeConfig,
    operator: Operator | None,
    choice: random.Random | None,
    *,
    trained: bool = False,
) -> QConfigFix:
    """The request for ``config``; weights per channel where ``choice`` says so and nothing speaks against it.

    >>> config = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
    >>> asked_for(config, None, None).activation.name
    'MinMaxObserver'
    """
    weighted = config.weight_dtype is not None
    axis = None if operator is None else operator.weight_channel_axis
    roles = Roles(activation=True, weight=weighted, bias=weighted, sums_axis=axis)
    made = qconfig_fix(unconditional(config), QConfigRequest(None, None), roles)
    if choice is not None and choice.random() < 0.5:
        made = _per_channel(made, config, operator)
    return _fake(made) if trained else made


def _per_channel(made: QConfigFix, config: DTypeConfig, operator: Operator | None) -> QConfigFix:
    demand = config.weight_dtype_with_constraints
    plain = made.weight.name == "MinMaxObserver" and demand.granularity is None
    if not plain or operator is None or operator.weight_channel_axis is None:
        return made
    if operator.family not in ("conv", "linear") or not operator.modules:
        return made
    if operator.weight_channel_axis != 0 or not is_quantized(demand.dtype):
        return made  # a scale for each channel of the input, which no engine has
    values = {**(made.weight.values or {}), "qscheme": torch.per_channel_symmetric}
    return replace_weight(made, ObserverFix("PerChannelMinMaxObserver", values))


def replace_weight(made: QConfigFix, weight: ObserverFix) -> QConfigFix:
    """``made`` with another observer of weights."""
    return made._replace(weight=weight)


def _fake(made: QConfigFix) -> QConfigFix:
    """The same as fake quantize modules, for training."""
    output = None if made.output is None else _fake_observer(made.output)
    return QConfigFix(_fake_observer(made.activation), _fake_observer(made.weight), output)


def _fake_observer(fix: ObserverFix) -> ObserverFix:
    if fix.name == "FixedQParamsObserver":
        return ObserverFix("FixedQParamsFakeQuantize", {"observer": fix})
    if fix.name not in _MEASURING:
        return fix
    return ObserverFix(
        "FakeQuantize", {"observer": replace(fix, values=None), **(fix.values or {})}
    )
