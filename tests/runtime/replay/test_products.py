"""Products that a recording quantizes at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.lower.kernels.boundary import quantize
from backquant.runtime.replay.program import Program
from backquant.runtime.replay.record import NotReplayable, record
from backquant.runtime.replay.shortened import shortened
from shortening import graph_of

pytestmark = pytest.mark.usefixtures("native_library")


def image(*shape: int) -> torch.Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last)


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return quantize(x, 0.03, 101, 0, 255, torch.uint8)


def gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return bytes_of(gate * x) + 1


def read_twice(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    y = x * gate
    return bytes_of(y) + y.sum().to(torch.uint8)


def changed_behind(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    x = x + 1
    y = x * gate
    x.mul_(2)
    return bytes_of(y) + bytes_of(x)


def changed_itself(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    y = x * gate
    y.add_(1)
    return bytes_of(y)


def as_a_result(x: torch.Tensor, gate: torch.Tensor) -> Any:
    y = x * gate
    return bytes_of(y), y


CASES = [
    (gated, image(2, 24, 5, 7), torch.rand(2, 24, 1, 1), 1),
    (gated, image(1, 37, 4, 4), torch.rand(1, 37, 1, 1), 1),
    (changed_behind, image(1, 16, 3, 3), torch.rand(1, 16, 1, 1), 1),
    (read_twice, image(1, 16, 3, 3), torch.rand(1, 16, 1, 1), 0),
    (changed_itself, image(1, 16, 3, 3), torch.rand(1, 16, 1, 1), 0),
    (as_a_result, image(1, 16, 3, 3), torch.rand(1, 16, 1, 1), 0),
    (gated, image(1, 16, 3, 3), torch.rand(1, 16, 3, 3), 0),
    (gated, image(1, 16, 3, 3).contiguous(), torch.rand(1, 16, 1, 1), 0),
    (gated, image(2, 16, 3, 3), torch.rand(1, 16, 1, 1), 0),
    (gated, image(1, 16, 3, 3), torch.rand(1, 16, 1, 1).double(), 0),
]


@pytest.mark.parametrize(("function", "x", "gate", "joined"), CASES)
def test_the_integers_are_those_of_both_operators(
    function: Any, x: torch.Tensor, gate: torch.Tensor, joined: int
) -> None:
    if gate.dtype is torch.float64:
        x = x.double()  # and the product is no float32

        def function(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
            return bytes_of((x * gate).float())

    expected, recording = record(function, (x, gate), {}, list)
    assert not isinstance(recording, NotReplayable)
    made = shortened(recording)
    names = [call.operator for call in made.calls]
    assert names.count(torch.ops.backquant_kernels.quantized_product.default) == joined
    assert (torch.ops.aten.mul.Tensor in names) == (not joined)
    found = Program(made)([x, gate])
    assert torch.equal(*(one[0] if isinstance(one, tuple) else one for one in (found, expected)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 24, 3, 2, 1), nn.Conv2d(24, 8, 1)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(24, 24, 1), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.silu(self.first(x))
        return self.last(self.gate(x) * x)


def test_a_model_gives_the_same_recorded_or_not() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 17, 16)
    model = backquant.quantize(Gated().eval(), x, backend="x86", calibration=[x], slower="keep")
    results = [model(x) for _ in range(4)]
    assert model.replays.programs == 1
    assert all(torch.equal(result, results[0]) for result in results)
    assert "quantized_product" in graph_of(next(iter(model.replays._found.values())).program)
