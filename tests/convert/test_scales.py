"""Measured scales that the backend does not take: the node goes back to float, with the reason."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from backquant.backend_config import get_x86_backend_config
from backquant.calibrate import calibrate
from backquant.convert import convert_to_reference, reference_state
from backquant.match import Outcome
from backquant.match.scale_rules import is_power_of_two
from backquant.nn.quantized import reference as nnqr
from backquant.prepare import prepared_state


def _backend(field: str, **bounds):
    backend = get_x86_backend_config()
    for entry in backend.configs:
        if entry.pattern is nn.Linear:
            changed = [copy.copy(config) for config in entry.dtype_configs]
            for config in changed:
                demand = replace(getattr(config, field), **bounds)
                setattr(config, field, demand)
            entry.set_dtype_configs(changed)
    return backend


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(self.conv(x).mean([2, 3]))


@pytest.mark.parametrize(
    ("field", "role"),
    [
        ("input_dtype_with_constraints", "input"),
        ("output_dtype_with_constraints", "output"),
        ("weight_dtype_with_constraints", "weight"),
    ],
)
def test_a_scale_above_the_bound(flow, field, role):
    backend = _backend(field, scale_max_upper_bound=1e-5)
    model, x = Net().eval(), torch.randn(2, 3, 4, 4)
    prepared = flow.prepare(model, backend=backend)
    calibrate(prepared, [x])
    assert prepared_state(prepared).plan.decisions["fc"].quantized
    converted = convert_to_reference(prepared)
    state = reference_state(converted)
    decision = state.plan.decisions["fc"]
    assert decision.outcome is Outcome.FLOAT
    assert decision.reasons[-1].rule == "scale-max"
    assert role in decision.reasons[-1].asked
    assert type(converted.fc) is nn.Linear
    assert isinstance(converted.conv, nnqr.Conv2d)
    # Its input is the output of mean, which stays quantized; its own output is not observed.
    last = prepared_state(prepared).sites.sites[-1]
    assert last.producer == "fc"
    assert last.name not in state.sites
    assert "fc = self.fc(dequantize" in converted.code
    assert converted.code.rstrip().endswith("return fc")


def test_a_scale_within_the_bound(flow):
    backend = _backend("output_dtype_with_constraints", scale_max_upper_bound=1e3)
    prepared = flow.prepare(Net().eval(), backend=backend)
    calibrate(prepared, [torch.randn(2, 3, 4, 4)])
    assert isinstance(convert_to_reference(prepared).fc, nnqr.Linear)


def test_an_input_observer_that_nobody_needs_goes(flow):
    """The float linear was the only reader of the model's input."""
    backend = _backend("input_dtype_with_constraints", scale_max_upper_bound=1e-5)
    prepared = flow.prepare(nn.Sequential(nn.Linear(4, 4)).eval(), backend=backend)
    x = torch.randn(2, 4)
    calibrate(prepared, [x])
    converted = convert_to_reference(prepared)
    assert "quantize" not in converted.code
    assert reference_state(converted).sites.sites == ()
    assert torch.equal(converted(x), prepared(x))


def test_power_of_two_scales(flow):
    """They are computed: see test_hardware_scales."""
    backend = _backend("output_dtype_with_constraints", power_of_two_scale=True)
    prepared = flow.prepare(nn.Sequential(nn.Linear(4, 4)).eval(), backend=backend)
    calibrate(prepared, [torch.randn(2, 4)])
    state = reference_state(convert_to_reference(prepared))
    assert state.plan.decisions["_0"].quantized
    last = prepared_state(prepared).sites.sites[-1]
    assert is_power_of_two(float(state.qparams[last.name].scale))
