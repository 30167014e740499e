from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from backquant.errors import CalibrationError, ConfigError
from backquant.observe import PerChannelMinMaxObserver

SCHEMES = [
    torch.per_channel_affine,
    torch.per_channel_symmetric,
    torch.per_channel_affine_float_qparams,
]


@pytest.mark.parametrize("qscheme", SCHEMES)
@pytest.mark.parametrize("axis", [0, 1, 3, -1])
@pytest.mark.parametrize("seed", range(5))
def test_qparams_equal_the_oracle(
    qscheme: torch.qscheme,
    axis: int,
    seed: int,
    oracle: Callable[..., Any],
    assert_same_qparams: Callable[..., None],
) -> None:
    kwargs: dict[str, Any] = {"ch_axis": axis, "dtype": torch.qint8, "qscheme": qscheme}
    ours = PerChannelMinMaxObserver(**kwargs)
    theirs = oracle("PerChannelMinMaxObserver", **kwargs)
    torch.manual_seed(seed)
    for _ in range(3):
        x = torch.randn(4, 3, 2, 5) + torch.randn(1)
        ours(x), theirs(x)
    assert torch.equal(ours.min_val, theirs.min_val)
    assert_same_qparams(ours.calculate_qparams(), theirs.calculate_qparams())


def test_merging_is_exact_also_with_one_that_saw_nothing() -> None:
    x = torch.randn(6, 3)
    whole = PerChannelMinMaxObserver(ch_axis=1)
    whole(x)
    parts = [PerChannelMinMaxObserver(ch_axis=1) for _ in range(4)]
    for part, rows in zip(parts[1:], x.split(2), strict=True):
        part(rows)
    merged = parts[0].merge(parts[2]).merge(parts[1]).merge(PerChannelMinMaxObserver(ch_axis=1))
    merged.merge(parts[3])
    assert torch.equal(merged.min_val, whole.min_val)
    assert torch.equal(merged.max_val, whole.max_val)


def test_merging_other_axes_or_channels_is_refused() -> None:
    one, two = PerChannelMinMaxObserver(), PerChannelMinMaxObserver(ch_axis=1)
    with pytest.raises(ConfigError, match="configured differently"):
        one.merge(two)
    other = PerChannelMinMaxObserver()
    one(torch.zeros(2, 3)), other(torch.zeros(3, 3))
    with pytest.raises(CalibrationError, match="saw 2 channels and now 3"):
        one.merge(other)


def test_another_number_of_channels_leaves_the_state_intact() -> None:
    observer = PerChannelMinMaxObserver()
    observer(torch.ones(3, 2))
    for channels in (1, 2):
        with pytest.raises(CalibrationError, match="number of channels"):
            observer(torch.zeros(channels, 2))
    assert observer.min_val.tolist() == [1.0, 1.0, 1.0]


def test_no_such_axis_is_refused_with_the_shape() -> None:
    with pytest.raises(ConfigError, match="no channel axis 2") as caught:
        PerChannelMinMaxObserver(ch_axis=2)(torch.zeros(3, 3))
    assert "[3, 3]" in caught.value.where


def test_a_channel_without_a_finite_value_counts_as_zero() -> None:
    observer = PerChannelMinMaxObserver()
    observer(torch.tensor([[1.0, 2.0], [float("nan"), float("nan")]]))
    assert observer.ignored == 2
    scale, zero_point = observer.calculate_qparams()
    assert scale.tolist() == pytest.approx([2 / 255, torch.finfo(torch.float32).eps])
    assert zero_point.tolist() == [0, 0]


def test_dynamic_is_refused() -> None:
    with pytest.raises(ConfigError, match="per tensor"):
        PerChannelMinMaxObserver(is_dynamic=True)
