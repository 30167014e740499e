from __future__ import annotations

import torch
from torch import nn

from backquant.speed.race import Race, race


def test_what_one_fast_call_says_decides_nothing() -> None:
    """The clock of a busy machine: one lucky call, or many unlucky ones."""
    assert Race(((2.0, 2.0, 2.0), (1.0, 1.0, 1.0))).is_slower(0, 1, 1.03)
    assert not Race(((2.0, 1.0, 1.0), (1.0, 1.0, 1.0))).is_slower(0, 1, 1.03)
    assert not Race(((1.0, 2.0, 2.0), (1.0, 1.0, 1.0))).is_slower(0, 1, 1.03)
    assert not Race(((1.0, 1.0, 1.0), (1.0, 0.5, 1.0))).is_slower(0, 1, 1.03)
    assert not Race(((2e-6,) * 3, (1e-6,) * 3)).is_slower(0, 1, 1.03)


def test_models_take_turns() -> None:
    order = []

    def clock(run: object) -> float:
        order.append(run.func)  # type: ignore[attr-defined]
        return 1.0

    one, other = nn.ReLU(), nn.Tanh()
    result = race([one, other], torch.zeros(1), clock)
    assert order[:4] == [one, other, one, other]
    assert len(result.turns[0]) == len(result.turns[1]) >= 3
