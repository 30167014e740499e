"""A model that is given back in float: what each operator says of itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import backquant
from backquant.match import Reason
from backquant.pipeline.capture import Capturing
from backquant.pipeline.recapture import planned_in_float
from backquant.prepare import Request
from backquant.reason_codes import ReasonCode

SLOW = Reason("", ReasonCode.SLOWER_THAN_FLOAT, "integers: 2 µs", "float: 1 µs")


class Modulated(nn.Module):
    """A weight that is computed from an input, as in StyleGAN, beside layers as any."""

    def __init__(self) -> None:
        super().__init__()
        self.style, self.weight = nn.Linear(4, 3), nn.Parameter(torch.randn(8, 3, 3, 3))
        self.attention, self.last = nn.MultiheadAttention(8, 2), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        weight = self.weight * self.style(z).reshape(1, 3, 1, 1)
        rows = F.conv2d(x, weight).flatten(2).permute(2, 0, 1)
        return torch.relu(self.last(self.attention(rows, rows, rows)[0]))


def test_the_first_cause_of_each_operator_is_its_own() -> None:
    model, example = Modulated().eval(), (torch.randn(1, 3, 6, 6), torch.randn(1, 4))
    mapping = backquant.get_default_qconfig_mapping("x86")
    request = Request(backquant.get_backend_config("x86"), mapping)
    quantized = backquant.quantize(model, backend="x86", calibration=[example], slower="keep")
    without = {reason.node: reason for reason in quantized.left_in_float}
    capturing = Capturing(example_inputs=example)
    step = planned_in_float(model, request, capturing, SLOW, without)
    rules = {
        name: decision.reasons[0].rule
        for name, decision in step.record.plan.decisions.items()
        if decision.reasons
    }
    assert rules["conv2d"] == ReasonCode.COMPUTED_WEIGHT
    for name in ("style", "attention", "last"):
        assert rules[name] == ReasonCode.SLOWER_THAN_FLOAT, rules
    assert not any(decision.quantized for decision in step.record.plan.decisions.values())
