from __future__ import annotations

import gc

import pytest

from backquant.graph import without_collector


def test_it_pauses_and_resumes() -> None:
    states = []

    @without_collector
    def step(value: int, *, twice: bool = False) -> int:
        """Its doc."""
        states.append(gc.isenabled())
        return step(value) if twice else value

    assert step(3, twice=True) == 3
    assert states == [False, False] and gc.isenabled()
    assert step.__doc__ == "Its doc."


def test_it_resumes_after_an_error() -> None:
    @without_collector
    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        without_collector(int)()
        assert not gc.isenabled()
    finally:
        gc.enable()
