"""Which observers wait for data."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backquant.qconfig as bq
from backquant.backend_config import get_x86_backend_config
from backquant.calibrate import UnseenObserver, calibrate, waiting_for_data
from backquant.errors import UsageError
from backquant.fuse import plan_fused
from backquant.graph import capture
from backquant.prepare import PreparedModule, Record, insert_observers


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return torch.sigmoid(F.linear(self.fc(x), self.weight))


def _prepared(mapping: bq.QConfigMapping) -> PreparedModule:
    x86 = get_x86_backend_config()
    fused, decided = plan_fused(capture(Model().eval()), x86, mapping)
    return insert_observers(
        fused.module,
        Record(decided, x86, mapping, scopes=fused.scopes, provenance=fused.provenance),
    )


def test_static_observers_wait_until_they_saw_data():
    prepared = _prepared(bq.get_default_qconfig_mapping("x86"))
    values = [item.value for item in waiting_for_data(prepared)]
    assert values == ["x", "fc", "linear"]  # not the weight, nor the fixed qparams of the sigmoid
    assert all(isinstance(item, UnseenObserver) for item in waiting_for_data(prepared))
    calibrate(prepared, [torch.randn(2, 4)])
    assert waiting_for_data(prepared) == ()


@pytest.mark.parametrize(
    "name",
    [
        "default_dynamic_qconfig",
        "per_channel_dynamic_qconfig",
        "float16_dynamic_qconfig",
        "float_qparams_weight_only_qconfig",
    ],
)
def test_nothing_else_waits(name):
    prepared = _prepared(bq.QConfigMapping().set_global(getattr(bq, name)))
    assert waiting_for_data(prepared) == ()


def test_a_static_rule_beside_dynamic_ones():
    mapping = bq.QConfigMapping().set_global(bq.default_dynamic_qconfig)
    mapping.set_module_name("fc", bq.get_default_qconfig("x86"))
    prepared = _prepared(mapping)
    assert [item.value for item in waiting_for_data(prepared)] == ["x", "fc"]


def test_a_weight_that_depends_on_an_input_waits():
    class Computed(nn.Module):
        def forward(self, x, w):
            return F.linear(x, w)

    x86, mapping = get_x86_backend_config(), bq.get_default_qconfig_mapping("x86")
    fused, decided = plan_fused(capture(Computed()), x86, mapping)
    prepared = insert_observers(fused.module, Record(decided, x86, mapping))
    assert [item.value for item in waiting_for_data(prepared)] == ["x", "w", "linear"]


def test_a_model_that_is_not_prepared():
    with pytest.raises(UsageError, match="not prepared"):
        waiting_for_data(torch.fx.symbolic_trace(nn.ReLU()))
