"""Sizes that are written out: what layers have is taken, what no memory holds is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from backquant.artifact.growth import check_numbers, check_sizes
from backquant.errors import ArtifactError

HONEST: tuple[tuple[str, list[Any], dict[str, Any]], ...] = (
    ("full", [[4, 4096], 250_000], {}),  # tokens
    ("full", [[1, 1, 8192, 8192], float("-inf")], {}),
    ("new_full", [None, [1, 77], 49_407], {}),
    ("randint", [0, 250_000, [4, 4096]], {}),
    ("arange", [131_072], {}),
    ("arange", [0, 100_000, 2], {}),
    ("arange", [10, 0, -1], {}),
    ("expand", [None, 32, -1, 128, 4096], {}),
    ("pad", [None, [512, 512, 512, 512]], {"value": 1e9}),
    ("pad", [None, None], {}),
    ("one_hot", [None, 250_000], {}),
    ("adaptive_avg_pool2d", [None, [7, None]], {}),
    ("eye", [8192], {}),
    ("diag_embed", [None, 1], {"dim1": 1, "dim2": 2}),
    ("max_unpool2d", [None, None, [512, 512]], {}),
    ("add", [None, 1 << 40], {}),
)


@pytest.mark.parametrize("call", HONEST, ids=lambda call: call[0])
def test_what_layers_have_is_taken(call: tuple[str, list[Any], dict[str, Any]]) -> None:
    check_sizes(*call, "node")
    check_numbers(call[0], call[1], "node")


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("diag_embed", [None, -100_000]),
        ("diag", [None, 1 << 20]),
        ("max_unpool2d", [None, None, [1 << 16, 1 << 16]]),
        ("affine_grid_generator", [None, [1, 1, 1 << 16, 1 << 16], False]),
        ("normal", [0.0, 1.0, [1 << 16, 1 << 16]]),
        ("expand_copy", [None, [1 << 16, 1 << 16]]),
    ],
)
def test_what_no_memory_holds_is_refused(name: str, args: list[Any]) -> None:
    with pytest.raises(ArtifactError, match="positions of numbers"):
        check_sizes(name, args, {}, "node")


def test_the_refusal_says_how_much(snapshot: Callable[..., None]) -> None:
    with pytest.raises(ArtifactError) as caught:
        check_sizes("zeros", [[1 << 20, 1 << 20]], {}, "node made")
    snapshot("size", caught.value)
    for name, args in (("pow", [2, 70_000]), ("mul", [70_000, [0]])):
        with pytest.raises(ArtifactError) as caught:
            check_numbers(name, args, "node made")
        snapshot(name, caught.value)


BY_HAND = {
    "numbers in a file": lambda *_: [
        check_sizes("zeros", [[1 << 13, 1 << 13]], {}, "node made"),
        check_numbers("mul", [65_536, [0]], "node made"),
    ],
}
