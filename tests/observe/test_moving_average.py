from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from backquant import observe
from backquant.errors import CalibrationError, ConfigError
from backquant.observe import (
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)


@pytest.mark.parametrize(
    "name", ["MovingAverageMinMaxObserver", "MovingAveragePerChannelMinMaxObserver"]
)
@pytest.mark.parametrize("constant", [0.01, 0.5, 1])
@pytest.mark.parametrize("seed", range(5))
def test_qparams_equal_the_oracle(
    name: str,
    constant: float,
    seed: int,
    oracle: Callable[..., Any],
    assert_same_qparams: Callable[..., None],
) -> None:
    ours = getattr(observe, name)(averaging_constant=constant, dtype=torch.qint8)
    theirs = oracle(name, averaging_constant=constant, dtype=torch.qint8)
    torch.manual_seed(seed)
    for step in range(5):
        x = torch.randn(3, 4) * (step + 1)
        ours(x), theirs(x)
        assert torch.equal(ours.min_val, theirs.min_val)
        assert_same_qparams(ours.calculate_qparams(), theirs.calculate_qparams())


@pytest.mark.parametrize(
    "cls", [MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver]
)
def test_merging_is_refused_with_the_reason(cls: Any) -> None:
    with pytest.raises(ConfigError, match="depends on the order of the batches") as caught:
        cls().merge(cls())
    assert cls.__name__.replace("MovingAverage", "") in caught.value.fix


def test_dynamic_needs_a_constant_of_one() -> None:
    assert MovingAverageMinMaxObserver(averaging_constant=1, is_dynamic=True).is_dynamic
    with pytest.raises(ConfigError, match="no moving average") as caught:
        MovingAverageMinMaxObserver(is_dynamic=True)
    assert caught.value.fix == "set averaging_constant=1"


def test_a_channel_that_was_not_finite_starts_later() -> None:
    observer = MovingAveragePerChannelMinMaxObserver(averaging_constant=0.5)
    observer(torch.tensor([[1.0], [float("nan")]]))
    observer(torch.tensor([[3.0], [4.0]]))
    assert observer.max_val.tolist() == [2.0, 4.0]
    observer(torch.tensor([[float("inf")], [6.0]]))
    assert observer.ignored == 2
    assert observer.max_val.tolist() == [2.0, 5.0]


def test_another_number_of_channels_is_refused() -> None:
    observer = MovingAveragePerChannelMinMaxObserver()
    observer(torch.zeros(3, 2))
    with pytest.raises(CalibrationError):
        observer(torch.zeros(1, 2))
