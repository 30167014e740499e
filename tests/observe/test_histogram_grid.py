from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from backquant.observe.histogram_grid import Bins, Counted, add_to_bins, merge_bins

values = st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=20)


def same(one: Bins, two: Bins) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, two, strict=True))


def count(x: torch.Tensor, bits: int, times: int = 1) -> Bins:
    return add_to_bins(None, [Counted(x, times)], bits)


@given(data=values, bits=st.integers(0, 10))
def test_every_finite_value_lies_in_one_bin_of_a_power_of_two(data: list[float], bits: int) -> None:
    x = torch.tensor(data, dtype=torch.float32)
    bins = count(x, bits)
    assert bins.key.tolist() == sorted(set(bins.key.tolist()))
    assert int(bins.number.sum()) == int(torch.isfinite(x).sum())
    for key, number, first, second in zip(*(b.tolist() for b in bins), strict=True):
        magnitude = key if key >= 0 else -key - 1
        ends = torch.tensor([magnitude, magnitude + 1], dtype=torch.int32) << (23 - bits)
        near, far = (float(e) for e in ends.view(torch.float32).double().clamp(max=2.0**128))
        mantissa = (far - near).hex().split("p")[0]
        assert mantissa == "0x1.0000000000000"  # a power of two
        assert (near / (far - near)).is_integer()  # anchored at its multiples
        sign = 1 if key >= 0 else -1
        inside = [v for v in data if near <= sign * v < far and (v >= 0) == (key >= 0)]
        steps = 1 << min(12, 23 - bits)
        places = [
            int((Fraction(abs(v)) - Fraction(near)) * steps / Fraction(far - near)) for v in inside
        ]
        assert (number, first, second) == (len(places), sum(places), sum(p * p for p in places))


@given(data=values, cut=st.integers(0, 20), bits=st.sampled_from([2, 7]))
def test_parts_add_up_to_the_whole_in_either_order(data: list[float], cut: int, bits: int) -> None:
    x = torch.tensor(data, dtype=torch.float32)
    whole, one, two = count(x, bits), count(x[:cut], bits), count(x[cut:], bits)
    assert same(merge_bins(one, two), whole)
    assert same(merge_bins(two, one), whole)
    assert same(add_to_bins(one, [Counted(x[cut:], 1)], bits), whole)
    assert same(add_to_bins(None, [Counted(x[cut:], 1), Counted(x[:cut], 1)], bits), whole)


@given(data=values, times=st.integers(1, 5))
def test_values_that_count_several_times(data: list[float], times: int) -> None:
    x = torch.tensor(data, dtype=torch.float32)
    assert same(count(x, 7, times), count(x.repeat(times), 7))


@given(
    data=values.filter(lambda v: any(map(torch.isfinite, torch.tensor(v)))), bits=st.integers(0, 10)
)
@example(data=[0.0, 0.0, 3.1389085600875902e-43], bits=3)
def test_values_lie_where_the_spread_says(data: list[float], bits: int) -> None:
    x = torch.tensor(data, dtype=torch.float32)
    x = x[x.isfinite()]
    lower, upper, number = count(x, bits).spread(bits, float(x.min()), float(x.max()))
    assert (lower[0], upper[-1]) == (x.min(), x.max())
    assert bool((lower <= upper).all() and (upper[:-1] <= lower[1:]).all())
    assert int(number.sum()) == len(x)
    width = 2.0 ** (-12 if bits <= 11 else bits - 23)
    mean = float(((lower + upper) / 2 * number).sum() / number.sum())
    largest = max(float(x.double().abs().max()), 2.0**-126)  # denormals have the bins of 2**-126
    slack = largest * 2.0**-bits
    assert mean == pytest.approx(float(x.double().mean()), abs=slack + width * slack)


def test_equal_values_have_no_width() -> None:
    x = torch.tensor([-3.0, 0.0, 0.0, 0.1875, 0.1875, 96.0])
    lower, upper, _ = count(x, 7).spread(7, float(x.min()), float(x.max()))
    assert lower.tolist() == upper.tolist() == [-3.0, 0.0, 0.1875, 96.0]


def test_every_level_of_8_bit_data_has_a_bin() -> None:
    for data in (torch.arange(256) / 255, torch.arange(256.0), torch.arange(-128, 128) / 128):
        assert len(count(data, 7).key) == 256


def test_even_spread_is_recovered() -> None:
    x = torch.linspace(1, 2, 12801)[:-1]
    lower, upper, _ = count(x, 7).spread(7, float(x.min()), float(x.max()))
    edges = 1 + torch.arange(129, dtype=torch.float64) / 128
    assert np.allclose(lower, edges[:-1], atol=2e-4)
    assert np.allclose(upper, edges[1:], atol=2e-4)


def test_minus_zero_is_zero() -> None:
    bins = count(torch.tensor([-0.0, 0.0]), 7)
    assert (bins.key.tolist(), bins.number.tolist()) == ([0], [2])


def test_extremes_of_float32() -> None:
    info = torch.finfo(torch.float32)
    x = torch.tensor([info.max, info.min, info.smallest_normal, 1e-45, -1e-45])
    bins = count(x, 7)
    assert bins.number.tolist() == [1, 1, 1, 1, 1]
    lower, upper, _ = bins.spread(7, float(x.min()), float(x.max()))
    assert np.isfinite(lower).all() and np.isfinite(upper).all()
    assert lower[0].item() == info.min


@pytest.mark.parametrize("number", [0, 1])
def test_nothing_finite_gives_no_bins(number: int) -> None:
    bins = count(torch.full((number,), float("nan")), 7)
    assert [len(part) for part in bins] == [0, 0, 0, 0]
    assert same(merge_bins(bins, bins), bins)
