from __future__ import annotations

import sys

from backquant.graph.dispatch_mode import DispatchMode
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
