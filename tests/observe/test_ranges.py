from __future__ import annotations

import pytest
import torch

from backquant.errors import CalibrationError, ConfigError
from backquant.observe.ranges import channel_range, check_channels, finite_range


def test_finite_values_alone_count() -> None:
    x = torch.tensor([1.0, float("nan"), -3.0, float("inf"), float("-inf")])
    with pytest.warns(RuntimeWarning, match="NaN or infinite"):
        found = finite_range(x)
    assert found is not None
    assert [v.item() for v in found] == [-3.0, 1.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_no_finite_value_is_none(bad: float) -> None:
    with pytest.warns(RuntimeWarning):
        assert finite_range(torch.full((3,), bad)) is None


def test_large_finite_values_are_finite() -> None:
    big = torch.finfo(torch.float32).max
    found = finite_range(torch.tensor([big, -big]))
    assert found is not None
    assert found[1].item() == big


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_channels_along_any_axis(axis: int) -> None:
    x = torch.randn(2, 3, 4)
    low, high = channel_range(x, axis)
    others = [d for d in range(3) if d != axis % 3]
    assert torch.equal(low, x.amin(others))
    assert torch.equal(high, x.amax(others))


def test_a_vector_has_one_value_per_channel() -> None:
    low, high = channel_range(torch.tensor([1.0, 2.0]), 0)
    assert low.tolist() == high.tolist() == [1.0, 2.0]


def test_channels_with_and_without_finite_values() -> None:
    x = torch.tensor([[1.0, float("nan")], [float("inf"), float("nan")]])
    with pytest.warns(RuntimeWarning):
        low, high = channel_range(x, 0)
    assert low.tolist() == [1.0, float("inf")]
    assert high.tolist() == [1.0, float("-inf")]


def test_missing_axis_is_refused() -> None:
    with pytest.raises(ConfigError, match="no channel axis 2"):
        channel_range(torch.zeros(2, 2), 2)


def test_changed_number_of_channels_is_refused() -> None:
    with pytest.raises(CalibrationError, match="saw 3 channels and now 1"):
        check_channels(torch.zeros(3), torch.zeros(1), 0)
