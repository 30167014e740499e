"""Granularities: one spelling, what each admits, blocks that divide."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from backquant.dtypes import Granularity, block_of
from backquant.errors import SpecError

KINDS = (
    "per_tensor",
    "per_channel",
    "per_channel(axis=1)",
    "per_group(axis=-1, size=32)",
    "per_block(shape=[64, 128])",
    "per_token",
)


@pytest.mark.parametrize("text", KINDS)
def test_text_and_data_are_one(text: str) -> None:
    parsed = Granularity.parse(text)
    assert str(parsed) == text
    assert Granularity.parse(text.replace(" ", "")) == parsed


def test_what_a_demand_leaves_open_admits_anything() -> None:
    asked = Granularity.parse("per_group(size=32)")
    assert Granularity.parse("per_group").admits(asked)
    assert Granularity.parse("per_group(axis=-1)").admits(asked)
    for other in ("per_group(size=64)", "per_group(axis=0)", "per_channel", "per_block"):
        assert not Granularity.parse(other).admits(asked)


def test_blocks() -> None:
    block = Granularity.parse("per_block(shape=[2, 4])")
    assert block.block((3, 6, 8)) == (1, 2, 4)
    assert block.undivided((3, 6, 8)) is None
    wrong = block.undivided((5, 8))
    assert wrong is not None
    assert (wrong.axis, wrong.size, wrong.length, wrong.nearest) == (0, 2, 5, 1)
    assert block_of((8, 64), (4, 2)) == (2, 32)


def test_messages(snapshot: Callable[..., None]) -> None:
    wrong = (
        "per_gruop",
        "per_group(sise=3)",
        "per_tensor(axis=1)",
        "per_block(shape=3)",
        "per_group(size=0)",
    )
    errors = []
    for text in wrong:
        with pytest.raises(SpecError) as error:
            Granularity.parse(text)
        errors.append(str(error.value))
    with pytest.raises(SpecError) as error:
        block_of((8, 64), (3, 2))
    snapshot("granularity", "\n".join([*errors, str(error.value)]))


BY_HAND = {
    "did you mean 'per_group'": lambda *_: Granularity.parse("per_group"),
    "per_": lambda fix, _: Granularity.parse(fix),
    "one scale for each block": lambda *_: block_of((8, 64), (4, 2)),
}
