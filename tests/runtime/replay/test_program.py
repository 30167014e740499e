from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from backquant.lower.kernels.views import integer_view, quantized_view
from backquant.runtime.replay.program import Program
from backquant.runtime.replay.record import Recording, record


def replayed(function: Callable[..., Any], *args: torch.Tensor) -> tuple[Program, Any]:
    with torch.no_grad():
        result, recording = record(function, args, {}, list)
    assert isinstance(recording, Recording), recording
    return Program(recording), result


def attention(x: torch.Tensor) -> torch.Tensor:
    query, key, value = x.view(1, 4, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(1, 4, 16)


def through_quantized(x: torch.Tensor) -> torch.Tensor:
    q = quantized_view(x, 0.5, 3)
    return integer_view(torch.ops.quantized.add.default(q, q, 0.7, 3))


def shuffled(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, 1)
    return torch.cat([right, F.pad(left, (0, 0)), torch.zeros_like(left)], 1)[:, ::2]


FLOATS = torch.randn(1, 4, 48)
INTEGERS = torch.randint(0, 256, (2, 6, 3, 3), dtype=torch.uint8)
CASES = [
    (attention, FLOATS),
    (shuffled, FLOATS),
    (lambda x: (F.gelu(x), x.amax(-1), F.layer_norm(x, (48,))), FLOATS),
    (lambda x: torch.clamp(x, -torch.inf, 0.25).to(torch.bfloat16).float(), FLOATS),
    (lambda x: x.topk(3), FLOATS),
    (through_quantized, INTEGERS),
    (through_quantized, INTEGERS.contiguous(memory_format=torch.channels_last)),
    (through_quantized, INTEGERS[:, ::2]),
    (through_quantized, INTEGERS[:0]),
    (lambda x: x.movedim(1, -1).contiguous(), INTEGERS),
]


@pytest.mark.parametrize(("function", "example"), CASES)
def test_it_does_what_the_call_did(function: Callable[..., Any], example: torch.Tensor) -> None:
    program, _ = replayed(function, example)
    changed = example.flip(0, 1) if example.is_floating_point() else 255 - example
    other = torch.empty_strided(example.size(), example.stride(), dtype=example.dtype)
    other.copy_(changed)
    expected, found = function(other), program([other])
    pairs = zip(*(v if isinstance(v, tuple) else (v,) for v in (expected, found)), strict=True)
    for want, got in pairs:
        assert torch.equal(want, got) and want.stride() == got.stride()


def test_memory_that_is_written_behind_a_schema_is_not_shared() -> None:
    """Two clones of one value stay two: a kernel may write into each."""

    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.relu(x)
        return y.clone(), y.clone()

    program, _ = replayed(twice, torch.ones(2))
    for _ in range(3):
        first, second = program([torch.ones(2)])
        assert first.data_ptr() != second.data_ptr()


def test_parts_of_a_constant_that_is_computed_once_are_not_written_to() -> None:
    """A GRU cell without a state: its zeros are a constant, and what follows writes to parts of a
    product of them."""
    cell = torch.nn.GRUCell(3, 4)
    x = torch.randn(2, 3)
    with torch.no_grad():
        _, recording = record(cell, (x,), {}, cell.parameters)
        assert isinstance(recording, Recording), recording
        program = Program(recording)
        assert all(torch.equal(program([x]), cell(x)) for _ in range(3))
