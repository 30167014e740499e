"""Memory that was freed is the system's again."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import backquant
from backquant.runtime.heap import give_back
from backquant.runtime.replay import replays

_HAS_TRIM = os.name == "posix" and hasattr(ctypes.CDLL(None), "malloc_trim")


def resident() -> float:
    """MiB of this process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.skipif(not _HAS_TRIM, reason="the allocator has no malloc_trim")
def test_gaps_are_given_back() -> None:
    """Tensors of 100 KB, of which every other one is gone."""
    made = [torch.ones(25_000) for _ in range(1_000)]
    del made[::2]
    before = resident()
    give_back()
    assert before - resident() > 20
    assert all(bool((x == 1).all()) for x in made)


def test_once_the_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the second call, which is recorded; not for each kind of inputs."""
    given: list[int] = []
    monkeypatch.setattr(replays, "give_back", lambda: given.append(1))
    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    quantized = backquant.quantize(model, x, backend="x86", calibration=[x], slower="keep")
    quantized.replays = replays.Replays(quantized.graph_module)
    counts = []
    for batch in (1, 1, 1, 2, 2):
        quantized(x[:batch])
        counts.append(len(given))
    assert quantized.replays.programs == 2
    assert counts == [0, 1, 1, 1, 1]
