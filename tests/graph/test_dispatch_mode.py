from __future__ import annotations

import sys

import pytest

from backquant.graph.interception import DispatchMode
from fresh import failures


class Count(DispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_recording_and_counting_import_no_compiler() -> None:
    recorded = """
import sys, torch
from backquant.runtime.replay.record import record
_, recording = record(torch.relu, (torch.ones(1),), {}, list)
assert len(recording.calls) == 1
assert "torch._dynamo" not in sys.modules
"""
    quantized = """
import sys, torch, backquant
model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval(), torch.ones(1, 8)
made = backquant.quantize(model, x, backend="x86", calibration=[x])
assert made.report.coverage == 1, made.report
for _ in range(3):
    made(x)
assert "torch._dynamo" not in sys.modules
"""
    assert failures([recorded, quantized]) == {}


def test_operators_are_seen_beside_the_compiler() -> None:
    import torch._dynamo

    assert "torch._dynamo" in sys.modules
    with Count() as count:
        torch.relu(torch.ones(1))
    assert count.calls == 2


_HELPERS = """
import sys, types, torch
from torch.nn.attention.flex_attention import flex_attention
helpers = types.ModuleType("helpers")
def branches(x):
    return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))
def attends(x):
    heads = x.reshape(1, 2, 4, 8)
    return flex_attention(heads, heads, heads).reshape(8, 8)
helpers.branches, helpers.attends = branches, attends
import warnings
warnings.filterwarnings("ignore", message="flex_attention called without")
"""


@pytest.mark.parametrize("helper", ["branches", "attends"])
def test_what_is_compiled_when_called_works_ever_after(helper: str) -> None:
    """Under a mode, PyTorch would skip that code and remember it for the rest of the process."""
    code = f"""{_HELPERS}
class Part(torch.nn.Module):
    def forward(self, x):
        return helpers.{helper}(x)

class Through(torch.nn.Module):  # a tracer does not go into Part
    def __init__(self):
        super().__init__()
        self.first, self.part, self.second = torch.nn.Linear(8, 8), Part(), torch.nn.Linear(8, 8)
    def forward(self, x):
        return self.second(self.part(self.first(x)))

model, x = Through().eval(), torch.randn(8, 8)
import backquant
made = backquant.quantize(model, backend="x86", calibration=[x])
assert "; 2 of " in str(made.report), made.report
with torch.no_grad():
    wanted, values = model(x), [made(x) for _ in range(4)]
    for value in values:
        assert (value - wanted).square().mean() < 1e-3 * wanted.square().mean()
    assert torch.equal(helpers.branches(x.abs()), x.abs() + 1)
    assert torch.equal(helpers.branches(-x.abs()), -x.abs() - 1)
    assert helpers.attends(x).shape == (8, 8)
"""
    assert failures([code]) == {}
