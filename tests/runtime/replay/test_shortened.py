"""All that shortens a recording, in one: what it costs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from backquant.runtime.replay.record import NotReplayable, Recording, record
from backquant.runtime.replay.shortened import shortened

pytestmark = pytest.mark.usefixtures("native_library")


def blocks(count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Joins that are read again and again, products with gates, tables, and quantized planes."""

    def run(x: torch.Tensor) -> torch.Tensor:
        kernels = torch.ops.backquant_kernels
        parts = [kernels.quantized_planes(x, 0.1, 3)]
        for _ in range(count):
            joined = torch.cat(parts[-3:], 1)
            floats = joined[:, :4].float().contiguous(memory_format=torch.channels_last)
            gate = floats.mean((2, 3), keepdim=True)
            parts.append(kernels.quantized(floats * gate, 0.1, 3))
            parts.append(kernels.quantized(x, 0.2, 3).contiguous(memory_format=torch.channels_last))
        return parts[-1]

    return run


def calls_of(recording: Recording) -> int:
    """How many functions are called to shorten it."""
    count = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        shortened(recording)
    finally:
        sys.setprofile(before)
    return count


def test_it_takes_as_many_steps_more_as_there_are_calls_more() -> None:
    found = []
    for count in (30, 120):
        _, made = record(blocks(count), (torch.randn(1, 4, 3, 3),), {}, list)
        assert not isinstance(made, NotReplayable)
        assert len(shortened(made).calls) < len(made.calls)
        found.append(calls_of(made))
    assert found[1] < 4.4 * found[0]
