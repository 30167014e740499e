"""Images whose channels a recording takes in turn, without joining them before."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backquant.lower.kernels.shuffle import shuffle
from shortening import operators_of

pytestmark = pytest.mark.usefixtures("native_library")


def shuffled(x: torch.Tensor) -> torch.Tensor:
    n, c, h, w = x.shape
    return shuffle(x, (n, 2, c // 2, h, w), (n, c, h, w))


def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return shuffled(torch.cat([x, y], 1))


def changed_behind(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    z = torch.cat([x, y], 1)
    x.fill_(3)
    return shuffled(z) + 1


def read_twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = torch.cat([x, y], 1)
    return shuffled(z) + z


def three(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return shuffled(torch.cat([x, y, x, y], 1))


def image(*shape: int) -> torch.Tensor:
    made = torch.randint(0, 256, shape, dtype=torch.uint8)
    return made.contiguous(memory_format=torch.channels_last)


JOINS = ("aten.cat.default", "backquant_kernels.joined.default")
CASES: list[tuple[Any, torch.Tensor, torch.Tensor, int]] = [
    (joined, image(1, 58, 5, 7), image(1, 58, 5, 7), 0),
    (joined, image(2, 3, 4, 4), image(2, 3, 4, 4), 0),
    (joined, image(2, 33, 9, 8), image(2, 66, 9, 8)[:, 33:], 0),
    (changed_behind, image(1, 16, 3, 3), image(1, 16, 3, 3), 0),
    (joined, image(1, 16, 3, 3), image(1, 48, 3, 3), 1),
    (joined, image(1, 1, 3, 3), image(1, 1, 3, 3), 1),
    (read_twice, image(1, 16, 3, 3), image(1, 16, 3, 3), 1),
    (three, image(1, 16, 3, 3), image(1, 16, 3, 3), 1),
]


@pytest.mark.parametrize(("function", "x", "y", "joins"), CASES)
def test_the_integers_and_their_places_are_those_of_the_operators(
    function: Any, x: torch.Tensor, y: torch.Tensor, joins: int
) -> None:
    found = operators_of(function, x, y)
    assert sum(str(operator) in JOINS for operator in found) == joins
