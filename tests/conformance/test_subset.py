"""A fixed part of what ``backquant conform`` tries, on each of PyTorch's engines: every case conforms.

Whole runs take some two CPU minutes for each engine; their outcomes are in docs/conformance.md.
"""

from __future__ import annotations

import pytest

import backquant
from backquant.conformance import ConformanceVerdict as Verdict

# a fused product, sums of 7 bits, what is measured at each call, two observers or one, statistics, tables
ENTRIES = {
    "x86": ["sum of two torch.nn.Conv2d"],
    "onednn": ["torch.nn.Tanh(torch.nn.Linear)", "cat of one called twice torch.nn.Linear"],
    "fbgemm": ["nn.ReLU(torch.nn.Linear)", "sum of one called twice torch.nn.Linear"],
    "qnnpack": ["moved before they are joined torch.nn.Conv1d", "torch.nn.InstanceNorm1d"],
    "native": ["torch.nn.LayerNorm", "torch.nn.AvgPool2d"],
    "x86_lowbit": ["torch.nn.Embedding", "torch.nn.functional.linear"],
}


@pytest.mark.parametrize("backend", ENTRIES)
def test_every_case_conforms(backend: str) -> None:
    entries = [entry.replace("F.", "torch.nn.functional.") for entry in ENTRIES[backend]]
    found = backquant.conform(backend, entries=entries, rounds=2, jobs=0)
    assert found.conforms and found.complete, str(found)
    assert found.counts[Verdict.CONFORMS] >= 20
    assert found.bit_equal >= 0.98 and found.worst <= 1
