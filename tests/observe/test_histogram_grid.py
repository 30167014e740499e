from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backquant.observe.histogram_grid import Bins, count_bins, merge_bins

values = st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=20)


def same(one: Bins, two: Bins) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, two, strict=True))


@given(data=values, bits=st.integers(0, 12))
def test_every_finite_value_lies_in_one_bin_of_a_power_of_two(data: list[float], bits: int) -> None:
    x = torch.tensor(data, dtype=torch.float32)
    bins = count_bins(x, bits)
    assert bins.key.tolist() == sorted(set(bins.key.tolist()))
    assert int(bins.number.sum()) == int(torch.isfinite(x).sum())
    for key, number, low, high in zip(*(b.tolist() for b in bins), strict=True):
        magnitude = key if key >= 0 else key + (256 << bits)
        ends = torch.tensor([magnitude, magnitude + 1], dtype=torch.int32) << (23 - bits)
        near, far = (float(e) for e in ends.view(torch.float32).double().clamp(max=2.0**128))
        mantissa = (far - near).hex().split("p")[0]
        assert mantissa == "0x1.0000000000000"  # a power of two
        assert (near / (far - near)).is_integer()  # anchored at its multiples
        sign = 1 if key >= 0 else -1
        inside = [v for v in data if near <= sign * v < far and (v >= 0) == (key >= 0)]
        assert (len(inside), min(inside), max(inside)) == (number, low, high)


@given(data=values, cut=st.integers(0, 20), bits=st.sampled_from([2, 8]))
def test_parts_add_up_to_the_whole_in_either_order(data: list[float], cut: int, bits: int) -> None:
    x = torch.tensor(data, dtype=torch.float32)
    one, two = count_bins(x[:cut], bits), count_bins(x[cut:], bits)
    assert same(merge_bins(one, two), count_bins(x, bits))
    assert same(merge_bins(two, one), count_bins(x, bits))


def test_minus_zero_is_zero() -> None:
    bins = count_bins(torch.tensor([-0.0, 0.0]), 8)
    assert (bins.key.tolist(), bins.number.tolist()) == ([0], [2])


def test_extremes_of_float32() -> None:
    info = torch.finfo(torch.float32)
    x = torch.tensor([info.max, info.min, info.smallest_normal, 1e-45, -1e-45])
    bins = count_bins(x, 8)
    assert bins.number.tolist() == [1, 1, 1, 1, 1]
    assert set(bins.high.tolist()) == set(x.tolist())


@pytest.mark.parametrize("shape", [(), (2, 0), (2, 3, 4)])
def test_any_shape_and_stride(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    transposed = x.permute(list(reversed(range(x.dim()))))
    assert same(count_bins(x, 8), count_bins(transposed, 8))
    assert int(count_bins(x, 8).number.sum()) == x.numel()
