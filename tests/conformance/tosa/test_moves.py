"""Moves of integers as TOSA operators, computed as the specification says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from backquant.conformance.tosa.moves import NoTosaError
from backquant.conformance.tosa.translate import translated_move
from backquant.lower.kernels.integer.resize import padded
from tosa_in_numpy import evaluated

#: A call, and what is written of it.
MOVES: dict[str, tuple[Any, str]] = {
    "permute": (lambda x: x.permute(0, 2, 3, 1), "TRANSPOSE"),
    "transpose": (lambda x: x.transpose(1, 3), "TRANSPOSE"),
    "reshape": (lambda x: x.reshape(2, -1), "RESHAPE"),
    "unsqueeze": (lambda x: x.unsqueeze(1), "RESHAPE"),
    "contiguous": (lambda x: x.contiguous(), "IDENTITY"),
    "a part": (lambda x: x[:, 1:3], "SLICE"),
    "one of an axis": (lambda x: x[:, 2], "SLICE + RESHAPE"),
    "every other": (lambda x: x[:, :, ::2], "RESHAPE + GATHER + RESHAPE"),
    "flip": (lambda x: x.flip(2), "REVERSE"),
    "repeat": (lambda x: x.repeat(1, 2, 1, 3), "TILE + TILE"),
    "each twice": (lambda x: x.repeat_interleave(2, 2), "RESHAPE + GATHER + RESHAPE"),
    "pad": (lambda x: padded(x, (1, 2, 0, 1), "constant", -7), "PAD"),
    "pad and crop": (lambda x: padded(x, (-1, 2), "constant", 5), "SLICE + PAD"),
    "reflect": (lambda x: padded(x, (1, 2, 0, 0), "reflect", 0), "RESHAPE + GATHER + RESHAPE"),
    "roll": (lambda x: x.roll(1, 2), "RESHAPE + GATHER + RESHAPE"),
    "part and order": (lambda x: x[:, 1:3].permute(3, 1, 0, 2), "SLICE + TRANSPOSE"),
}


def integers(dtype: torch.dtype) -> Tensor:
    info = torch.iinfo(dtype)
    return torch.randint(info.min, info.max + 1, (2, 4, 6, 8), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize("name", MOVES)
def test_a_move_is_written(name: str, dtype: torch.dtype) -> None:
    """By the operator that does so, and it gives what PyTorch gives."""
    move, written = MOVES[name]
    x = integers(dtype)
    graph, output = translated_move(move, x)
    assert graph.written() == written
    assert np.array_equal(evaluated(graph, output), move(x).numpy())


@pytest.mark.parametrize(
    "move",
    [
        lambda x: F.pixel_shuffle(x, 2),
        lambda x: x.diagonal(0, 2, 3),
        lambda x: x.unsqueeze(1).expand(2, 3, 4, 6, 8),
        lambda x: x.unfold(2, 3, 1),
    ],
)
def test_what_is_not_picked_axis_by_axis_is_gathered(move: Any) -> None:
    x = integers(torch.int8)
    graph, output = translated_move(move, x)
    assert "GATHER" in graph.written()
    assert np.array_equal(evaluated(graph, output), move(x).numpy())


def test_what_adds_several_constants_is_refused() -> None:
    """PAD has one."""

    def move(x: Tensor) -> Tensor:
        ends = torch.tensor([1, 2], dtype=x.dtype).reshape(2, 1, 1, 1)
        return torch.cat([x, ends.expand(2, 1, 6, 8)], 1)

    with pytest.raises(NoTosaError, match="more than one constant"):
        translated_move(move, integers(torch.int8))
