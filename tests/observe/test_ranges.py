from __future__ import annotations

import pytest
import torch

from backquant.errors import ConfigError
from backquant.observe.minmax import channel_range, finite_range


def test_finite_values_alone_count() -> None:
    x = torch.tensor([1.0, float("nan"), -3.0, float("inf"), float("-inf")])
    low, high, ignored = finite_range(x)
    assert (low.item(), high.item(), ignored) == (-3.0, 1.0, 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_no_finite_value_is_an_empty_range(bad: float) -> None:
    low, high, ignored = finite_range(torch.full((3,), bad))
    assert (low.item(), high.item(), ignored) == (float("inf"), float("-inf"), 3)


def test_an_empty_tensor_is_an_empty_range() -> None:
    low, high, ignored = finite_range(torch.empty(2, 0))
    assert (low.item(), high.item(), ignored) == (float("inf"), float("-inf"), 0)


def test_large_finite_values_are_finite() -> None:
    big = torch.finfo(torch.float32).max
    low, high, ignored = finite_range(torch.tensor([big, -big]))
    assert (low.item(), high.item(), ignored) == (-big, big, 0)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_channels_along_any_axis(axis: int) -> None:
    x = torch.randn(2, 3, 4)
    low, high, ignored = channel_range(x, axis)
    assert ignored == 0
    others = [d for d in range(3) if d != axis % 3]
    assert torch.equal(low, x.amin(others))
    assert torch.equal(high, x.amax(others))


def test_a_vector_has_one_value_per_channel() -> None:
    low, high, _ = channel_range(torch.tensor([1.0, 2.0]), 0)
    assert low.tolist() == high.tolist() == [1.0, 2.0]


def test_channels_with_and_without_finite_values() -> None:
    x = torch.tensor([[1.0, float("nan")], [float("inf"), float("nan")]])
    low, high, ignored = channel_range(x, 0)
    assert ignored == 3
    assert low.tolist() == [1.0, float("inf")]
    assert high.tolist() == [1.0, float("-inf")]


def test_missing_axis_is_refused() -> None:
    with pytest.raises(ConfigError, match="no channel axis 2"):
        channel_range(torch.zeros(2, 2), 2)
