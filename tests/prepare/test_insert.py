"""The prepared copy: it changes nothing outside of itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from backquant.backend_config import get_x86_backend_config
from backquant.errors import ConfigError
from backquant.prepare import prepared_state
from backquant.qconfig import PrepareCustomConfig, QConfig


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return torch.relu(self.norm(torch.sin(self.bn(torch.sin(self.conv(x))))))


def _snapshot(model: nn.Module) -> dict[str, object]:
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    flags = {name: module.training for name, module in model.named_modules()}
    keys = {name: set(module.__dict__) for name, module in model.named_modules()}
    return {
        "tensors": tensors,
        "flags": flags,
        "keys": keys,
        "modules": [*dict(model.named_modules())],
    }


@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_unchanged(flow, training):
    model = Small().train(training)
    before = _snapshot(model)
    prepared = flow.prepare(model)
    prepared(torch.randn(4, 3, 8, 8))  # in train mode this updates running statistics
    after = _snapshot(model)
    assert all(torch.equal(after["tensors"][n], t) for n, t in before["tensors"].items())
    assert {k: before[k] for k in ("flags", "keys", "modules")} == {
        k: after[k] for k in ("flags", "keys", "modules")
    }


def test_training_flags_and_parameters_are_those_of_the_model(flow):
    model = Small().eval()
    model.norm.train()
    prepared = flow.prepare(model)
    assert not prepared.training
    assert prepared.norm.training
    assert not prepared.activation_post_process_0.training
    assert prepared.norm.weight is model.norm.weight


def test_preserved_attributes_stay(flow):
    from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY

    from backquant.graph import capture
    from backquant.match.plan import Plan
    from backquant.prepare import Record, insert_observers
    from backquant.qconfig import QConfigMapping

    model = Small().eval()
    model.classes = ["cat", "dog"]
    captured = capture(model, preserved_attributes=["classes"])
    prepared = insert_observers(
        captured.module, Record(Plan("x86"), get_x86_backend_config(), QConfigMapping())
    )
    assert prepared.classes == ["cat", "dog"]
    assert copy.deepcopy(prepared).classes == ["cat", "dog"]
    assert _USER_PRESERVED_ATTRIBUTES_KEY in prepared.meta


def test_taken_names_are_skipped(flow):
    class Taken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.activation_post_process_0 = nn.Linear(4, 4)

        def forward(self, x):
            return self.activation_post_process_0(x)

    prepared = flow.prepare(Taken().eval())
    names = [site.name for site in prepared_state(prepared).sites.sites]
    assert names == ["activation_post_process_1", "activation_post_process_2"]
    assert isinstance(prepared.activation_post_process_0, nn.Linear)


def test_quantized_inputs_are_not_observed(flow):
    custom = PrepareCustomConfig().set_input_quantized_indexes([0])
    prepared = flow.prepare(nn.Sequential(nn.Linear(4, 4)).eval(), custom=custom)
    [site] = prepared_state(prepared).sites.sites
    assert site.producer == "_0"


def test_a_qconfig_that_makes_no_observer_is_refused(flow):
    mapping = flow.mapping().set_global(QConfig(nn.ReLU, nn.ReLU))
    with pytest.raises(ConfigError, match="neither an observer nor a fake-quantizer"):
        flow.prepare(nn.Sequential(nn.Linear(4, 4)).eval(), mapping)


def test_models_on_several_devices_are_refused(flow):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta")).eval()
    with pytest.raises(ConfigError, match="on several devices"):
        flow.prepare(model)


def test_cost_is_linear(flow):
    """Work per node does not grow with the graph: counted in calls, not in seconds."""
    import sys

    class Chain(nn.Module):
        def __init__(self, length: int) -> None:
            super().__init__()
            self.length = length
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            for _ in range(self.length):
                y = torch.nn.functional.linear(x, self.weight)
                x = torch.cat([y, x], 1).reshape(-1, 4)
            return x

    def calls(length: int) -> int:
        from backquant.graph import capture
        from backquant.match import make_plan, plan_fusion
        from backquant.prepare import Record, insert_observers

        backend, mapping = get_x86_backend_config(), flow.mapping()
        captured = capture(Chain(length).eval())
        assert plan_fusion(captured.module, backend) == ()
        planned = make_plan(captured.module, captured.scopes, backend, mapping)
        counted = 0

        def count(frame, event, argument):
            nonlocal counted
            counted += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            insert_observers(captured.module, Record(planned, backend, mapping))
        finally:
            sys.setprofile(None)
        return counted

    fixed = calls(2)
    small, large = calls(40) - fixed, calls(160) - fixed
    assert large < 4.6 * small


def test_custom_modules_stay_float_and_say_so(flow):
    from dataclasses import replace

    from backquant.graph import capture
    from backquant.match import CustomMatching, MatchKind, Outcome, make_plan
    from backquant.prepare import Record, insert_observers

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    captured, backend, mapping = capture(model), get_x86_backend_config(), flow.mapping()
    apart = replace(CustomMatching(), standalone_names=frozenset({"1"}))
    planned = make_plan(captured.module, captured.scopes, backend, mapping, custom=apart)
    assert planned.matches[1].kind is MatchKind.STANDALONE
    state = prepared_state(insert_observers(captured.module, Record(planned, backend, mapping)))
    assert state.plan.decisions["_1"].outcome is Outcome.FLOAT
    assert state.plan.decisions["_1"].reasons[-1].rule == "standalone"
    assert [site.producer for site in state.sites.sites] == ["", "_0"]
