"""More through ``convert_fx``, beside PyTorch's: tests/api/custom/test_convert.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    get_x86_backend_config,
)
from backquant.convert.reference import all_in_float, check_rules, replanned
from backquant.errors import ConfigError
from backquant.match import Outcome, Plan
from backquant.prepare import prepared_state
from backquant.qconfig import QConfigMapping, default_dynamic_qconfig, default_qconfig


def outcomes(plan: Plan) -> dict[str, str]:
    return {name: decision.outcome.value for name, decision in plan.decisions.items()}


def test_nothing_asked_changes_nothing(flow):
    model, _ = flow.model("mlp")
    prepared = flow.prepare(model)
    state = prepared_state(prepared)
    assert replanned(prepared, state, None, None) is state


@pytest.mark.parametrize("name", ["residual", "functional", "shared_modules"])
def test_the_same_again_gives_the_same_plan(flow, name):
    model, _ = flow.model(name)
    prepared = flow.prepare(model)
    state = prepared_state(prepared)
    again = replanned(prepared, state, flow.mapping(), get_x86_backend_config())
    assert again.plan.decisions == state.plan.decisions
    assert again.plan.matches == state.plan.matches
    assert prepared.meta["backquant"] is state


def test_rules_have_to_be_there():
    mapping = QConfigMapping().set_module_name("fc", default_qconfig).set_object_type("view", None)
    check_rules(mapping, mapping)
    more = QConfigMapping().set_object_type("view", None).set_module_name("fc", None)
    check_rules(mapping, more.set_module_name("other", None))
    with pytest.raises(ConfigError, match=r"lacks the rule 'module_name fc'"):
        check_rules(mapping, QConfigMapping().set_object_type("view", None))
    other = QConfigMapping().set_object_type("view", None)
    with pytest.raises(ConfigError, match="another QConfig than the model was prepared with"):
        check_rules(mapping, other.set_module_name("fc", default_dynamic_qconfig))
    with pytest.raises(ConfigError, match="rule 'global' asks for another"):
        check_rules(mapping, more.set_global(default_qconfig))


def test_what_was_refused_keeps_its_reason(flow):
    """An output without an observer to share was refused while observers were placed."""

    class Net(nn.Module):
        def forward(self, x):
            return torch.sin(x).reshape(-1)

    prepared = flow.prepare(Net())
    state = prepared_state(prepared)
    assert state.plan.decisions["reshape"].reasons[-1].rule == "nothing-to-share"
    again = replanned(prepared, state, flow.mapping(), None)
    assert again.plan.decisions["reshape"].outcome is Outcome.FLOAT
    assert again.plan.decisions["reshape"].reasons[-1].rule == "nothing-to-share"


def test_what_another_backend_groups_otherwise_stays_float(flow):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return torch.relu(self.fc(x))

    x86 = get_x86_backend_config()
    int8 = next(e for e in x86.configs if e.pattern is nn.Linear).dtype_configs
    single = BackendPatternConfig(nn.Linear).set_dtype_configs(int8).set_root_module(nn.Linear)
    double = BackendPatternConfig((nn.Linear, torch.relu)).set_dtype_configs(int8)
    relu = BackendPatternConfig(torch.relu).set_dtype_configs(
        [DTypeConfig(torch.quint8, torch.quint8)]
    )
    one = BackendConfig("one").set_backend_pattern_configs([single, relu])
    two = BackendConfig("two").set_backend_pattern_configs([single, double])
    prepared = flow.prepare(Net().eval(), backend=one)
    state = prepared_state(prepared)
    assert outcomes(state.plan) == {"fc": "quantized", "relu": "quantized"}
    again = replanned(prepared, state, None, two).plan
    assert outcomes(again) == {"fc": "float", "relu": "float"}
    reason = again.decisions["fc"].reasons[-1]
    assert (reason.rule, reason.asked) == ("not-prepared", "Linear, torch.relu, quantized")
    assert reason.admitted.endswith(": torch.relu")
    assert again.backend == "two"


def test_in_float(flow):
    model, _ = flow.model("mlp")
    plan = prepared_state(flow.prepare(model)).plan
    left = all_in_float(plan)
    assert "quantized" not in outcomes(left).values()
    assert replace(left, decisions={}) == replace(plan, decisions={})
