"""Images that a recording quantizes and lays out in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backquant.lower.kernels.boundary import quantize
from shortening import operators_of

pytestmark = pytest.mark.usefixtures("native_library")


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return quantize(x, 0.03, 101, 0, 255, torch.uint8)


def laid_out(x: torch.Tensor) -> torch.Tensor:
    return bytes_of(x).clone(memory_format=torch.channels_last)


def changed_behind(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    y = bytes_of(x)
    x.mul_(2)
    return y.clone(memory_format=torch.channels_last) + bytes_of(x).sum().to(torch.uint8)


def read_twice(x: torch.Tensor) -> torch.Tensor:
    y = bytes_of(x)
    return y.clone(memory_format=torch.channels_last) + y


def copied_as_it_is(x: torch.Tensor) -> torch.Tensor:
    return bytes_of(x).clone()


CASES: list[tuple[Any, torch.Tensor, int]] = [
    (laid_out, torch.randn(1, 3, 37, 11), 1),
    (laid_out, torch.randn(2, 3, 4, 4), 1),
    (laid_out, torch.randn(2, 5, 9, 13), 1),
    (laid_out, torch.randn(2, 70, 8, 8), 1),
    (laid_out, torch.randn(1, 1, 65, 1), 1),
    (changed_behind, torch.randn(1, 3, 5, 7), 1),
    (read_twice, torch.randn(1, 3, 5, 7), 0),
    (copied_as_it_is, torch.randn(1, 3, 5, 7), 0),
    (laid_out, torch.randn(1, 3, 5, 7).contiguous(memory_format=torch.channels_last), 0),
]


@pytest.mark.parametrize(("function", "x", "joined"), CASES)
def test_the_integers_and_their_places_are_those_of_both_operators(
    function: Any, x: torch.Tensor, joined: int
) -> None:
    assert (
        operators_of(function, x).count(torch.ops.backquant_kernels.quantized_planes.default)
        == joined
    )
