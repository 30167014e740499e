from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from backquant.backend_config import get_x86_backend_config
from backquant.graph import capture
from backquant.match import CustomMatching, Plan, make_plan
from backquant.prepare.standalone import Interface, interfaces
from backquant.qconfig import (
    PrepareCustomConfig,
    QConfigMapping,
    QuantType,
    default_dynamic_qconfig,
    default_qconfig,
    default_weight_only_qconfig,
)


class Observed(nn.Module):
    @classmethod
    def from_float(cls, module):
        return module


class Mine(nn.Module):
    def forward(self, x, pair, *, scale=None):
        return x


def found(model: nn.Module, cls: type, kind: QuantType, qconfig) -> dict[str, Interface]:
    custom = PrepareCustomConfig().set_float_to_observed_mapping(cls, Observed, kind)
    captured = capture(model.eval(), non_traceable_classes=[cls])
    plan = make_plan(
        captured.module,
        captured.scopes,
        get_x86_backend_config(),
        QConfigMapping().set_global(qconfig),
        custom=CustomMatching.of(custom),
    )
    assert interfaces(captured.module, plan, None) == {}
    return interfaces(captured.module, plan, custom)


class Calls(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part


class CallsMine(Calls):
    def forward(self, x, y, z):
        return self.part(x, (y, [z]), scale=x)


class CallsAttention(Calls):
    def forward(self, x, y, mask):
        return self.part(x, y, value=y, key_padding_mask=mask)[0]


class CallsLSTM(Calls):
    def forward(self, x, y, z):
        return self.part(x, (y, z))[0]


def test_static_modules_are_observed_like_operators() -> None:
    (own,) = found(CallsMine(Mine()), Mine, QuantType.STATIC, default_qconfig).values()
    assert [node.name for node in own.inputs] == ["x", "y", "z"]
    assert own.observed_output


@pytest.mark.parametrize(
    ("kind", "qconfig"),
    [
        (QuantType.DYNAMIC, default_dynamic_qconfig),
        (QuantType.WEIGHT_ONLY, default_weight_only_qconfig),
    ],
)
def test_other_kinds_are_not_observed(kind: QuantType, qconfig) -> None:
    assert found(CallsMine(Mine()), Mine, kind, qconfig) == {"part": Interface()}


def test_tuples_are_not_observed() -> None:
    model = CallsLSTM(nn.LSTM(4, 4))
    (own,) = found(model, nn.LSTM, QuantType.STATIC, default_qconfig).values()
    assert [node.name for node in own.inputs] == ["x", "y", "z"]
    assert not own.observed_output and own.gives == torch.float32


def test_masks_are_not_observed() -> None:
    model = CallsAttention(nn.MultiheadAttention(4, 1))
    cls = nn.MultiheadAttention
    (own,) = found(model, cls, QuantType.STATIC, default_qconfig).values()
    assert [node.name for node in own.inputs] == ["x", "y"]
    assert not own.observed_output


def test_no_plan_no_interfaces() -> None:
    assert interfaces(fx.symbolic_trace(nn.ReLU()), Plan("b"), PrepareCustomConfig()) == {}
