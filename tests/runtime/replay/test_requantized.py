"""Bytes that a recording takes to other bytes by a table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backquant.lower.kernels.boundary import quantize
from shortening import operators_of

pytestmark = pytest.mark.usefixtures("native_library")


def floats_of(x: torch.Tensor, scale: float = 0.017) -> torch.Tensor:
    return torch.ops.aten._make_per_tensor_quantized_tensor.default(x, scale, 7).dequantize()


def bytes_of(x: torch.Tensor, zero_point: int = 101) -> torch.Tensor:
    return quantize(x, 0.03, zero_point, 0, 255, torch.uint8)


def other_bytes(x: torch.Tensor) -> torch.Tensor:
    return bytes_of(floats_of(x))


def of_a_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.split(x.shape[1] // 2, 1)
    return torch.cat([bytes_of(floats_of(second)), bytes_of(floats_of(first), 0)], 1)


def changed_behind(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    y = floats_of(x)
    x.fill_(3)
    return bytes_of(y) + x


def read_twice(x: torch.Tensor) -> torch.Tensor:
    y = floats_of(x)
    return bytes_of(y) + bytes_of(y.relu(), 3)


def image(*shape: int) -> torch.Tensor:
    made = torch.randint(0, 256, shape, dtype=torch.uint8)
    return made.contiguous(memory_format=torch.channels_last)


CASES: list[tuple[Any, torch.Tensor, int]] = [
    (other_bytes, image(1, 24, 5, 7), 1),
    (other_bytes, image(2, 3, 4, 4), 1),
    (of_a_half, image(2, 116, 9, 8), 2),
    (of_a_half, image(1, 260, 3, 3), 2),
    (changed_behind, image(1, 16, 3, 3), 1),
    (read_twice, image(1, 16, 3, 3), 0),
    (other_bytes, image(1, 16, 6, 6)[:, :, 1:4], 0),
    (other_bytes, image(1, 16, 6, 6).contiguous(), 0),
    (other_bytes, torch.randint(0, 256, (5, 9), dtype=torch.uint8), 0),
]


@pytest.mark.parametrize(("function", "x", "joined"), CASES)
def test_the_integers_and_their_places_are_those_of_the_operators(
    function: Any, x: torch.Tensor, joined: int
) -> None:
    assert operators_of(function, x).count(torch.ops.backquant_kernels.looked_up.default) == joined
