"""Images whose channels a recording puts behind each other, at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shortening import operators_of

pytestmark = pytest.mark.usefixtures("native_library")

CAT = torch.ops.aten.cat.default
RUN = torch.ops.backquant_kernels
NUMBERS = {c: torch.linspace(-1, 3, 2 * (c + 16)) for c in (32, 97, 162)}


def scaled(x: torch.Tensor, numbers: torch.Tensor, low: int) -> torch.Tensor:
    return RUN.rescaled(x, numbers, low)  # type: ignore[no-any-return]


def image(*shape: int) -> torch.Tensor:
    made = torch.randint(0, 256, shape, dtype=torch.uint8)
    return made.contiguous(memory_format=torch.channels_last)


def joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, 1)


def twice(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.cat(parts, 1), parts[0]], 1)


def changed_behind(*parts: torch.Tensor) -> torch.Tensor:
    first = parts[0].clone()
    made = torch.cat([first, *parts[1:]], 1)
    first.fill_(3)
    return torch.cat([made, first], 1)


def rescaled(*parts: torch.Tensor) -> torch.Tensor:
    made = torch.cat(parts, 1)
    return scaled(made, NUMBERS[made.shape[1]], 5)


def rescaled_and_read(*parts: torch.Tensor) -> torch.Tensor:
    made = torch.cat(parts, 1)
    return scaled(made, NUMBERS[made.shape[1]], 5) + made


def rescaled_by_what_is_made_behind(*parts: torch.Tensor) -> torch.Tensor:
    made = torch.cat(parts, 1)
    return scaled(made, torch.linspace(-1, 3, 2 * (made.shape[1] + 16)), 5)


def rows(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, 2)


CASES: list[tuple[Callable[..., torch.Tensor], list[torch.Tensor], int]] = [
    (joined, [image(1, 64, 5, 7), image(1, 32, 5, 7)], 0),
    (joined, [image(2, 3, 4, 4), image(2, 35, 4, 4), image(2, 70, 4, 4)], 0),
    (joined, [image(2, 66, 9, 8)[:, 33:], image(2, 66, 9, 8)[:, :7]], 0),
    (joined, [image(1, 48, 3, 3)], 0),
    (twice, [image(1, 48, 3, 3), image(1, 5, 3, 3)], 0),
    (changed_behind, [image(1, 16, 3, 3), image(1, 20, 3, 3)], 0),
    (rescaled, [image(1, 64, 8, 8), image(1, 33, 8, 8), image(1, 70, 8, 8)[:, 5:]], 0),
    (rescaled_by_what_is_made_behind, [image(1, 16, 3, 3), image(1, 16, 3, 3)], 0),
    (rescaled_and_read, [image(1, 16, 3, 3), image(1, 16, 3, 3)], 0),
    (joined, [image(1, 16, 3, 3), image(1, 16, 3, 3).contiguous()], 1),
    (joined, [image(1, 16, 3, 3).int(), image(1, 16, 3, 3).int()], 1),
    (joined, [image(3, 16, 1, 1)[..., 0, 0], image(3, 5, 1, 1)[..., 0, 0]], 1),
    (rows, [image(1, 16, 3, 3), image(1, 16, 4, 3)], 1),
]


@pytest.mark.parametrize(("function", "parts", "left"), CASES)
def test_the_integers_and_their_places_are_those_of_the_operators(
    function: Callable[..., torch.Tensor], parts: list[torch.Tensor], left: int
) -> None:
    assert operators_of(function, *parts, constants=NUMBERS.values()).count(CAT) == left


def test_what_is_scaled_behind_it_is_never_joined_by_itself() -> None:
    parts = [image(1, 64, 8, 8), image(1, 33, 8, 8)]
    assert operators_of(rescaled, *parts, constants=NUMBERS.values()) == [
        RUN.joined_rescaled.default
    ]


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [image(1, 4, 3, 3).float()],
        [image(1, 4, 3, 3).contiguous()],
        [image(1, 4, 3, 3), image(1, 4, 3, 2)],
        [image(0, 4, 3, 3)],
        [torch.zeros(3, 4, dtype=torch.uint8)],
    ],
)
def test_what_is_no_image_is_refused(parts: list[torch.Tensor]) -> None:
    with pytest.raises(RuntimeError):
        RUN.joined(parts)
