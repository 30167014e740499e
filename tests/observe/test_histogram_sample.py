from __future__ import annotations

import math

import pytest
import torch

from backquant.observe import HistogramObserver, MinMaxObserver
from backquant.observe.histogram import EVERY_VALUE, TAIL, sample_values

SIZES = [4097, 5000, 65_536, 100_352, 262_145]


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Values counted once, values counted several times, and how many times."""
    tail, bulk = sample_values(x).counted
    assert tail.times == 1
    exact, sampled = (part.values[~part.values.isnan()] for part in (tail, bulk))
    return exact, sampled, bulk.times


@pytest.mark.parametrize("size", [0, 1, 1000, EVERY_VALUE])
def test_few_values_are_all_counted(size: int) -> None:
    x = torch.randn(size)
    counted = sample_values(x).counted
    assert [part.times for part in counted] == [1] * (size > 0)
    assert all(torch.equal(part.values, x) for part in counted)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["two ends", "one end", "the other end", "unequal ends"])
def test_extremes_are_exact_and_the_tail_whole(size: int, kind: str) -> None:
    x = torch.randn(size)
    made = {
        "two ends": x,
        "one end": x.relu(),
        "the other end": -x.abs(),
        "unequal ends": x.exp() - 1.5,
    }
    x = made[kind]
    taken = sample_values(x)
    assert (taken.low, taken.high) == (x.min(), x.max())
    exact, bulk, _ = split(x)
    for sign in (1, -1):
        signed, side = sign * x, (sign * exact)[sign * exact > 0].sort().values
        if signed.max() <= 0:
            assert len(side) == 0
            continue
        assert len(side) >= TAIL[0] - 1
        assert torch.equal(side, signed[signed >= side[0]].sort().values)
        assert (sign * bulk).max() < side[0]


@pytest.mark.parametrize("size", SIZES)
def test_the_numbers_add_up(size: int) -> None:
    exact, bulk, times = split(torch.randn(size))
    assert len(exact) + len(bulk) * times == pytest.approx(size, rel=0.02)


@pytest.mark.parametrize("shape", [(1, 64, 56, 56), (1, 196, 768), (8, 3, 64, 64)])
def test_every_channel_has_its_turn(shape: tuple[int, ...]) -> None:
    channels = torch.arange(shape[1]).view(-1, *[1] * (len(shape) - 2)).expand(shape)
    exact, bulk, times = split(channels.float().contiguous())
    assert math.gcd(times, channels.numel()) == 1
    assert set(torch.cat((exact, bulk)).int().tolist()) == set(range(shape[1]))


def test_values_that_stand_together_are_counted_in_all() -> None:
    """A channel of outliers: the largest are tail, the others have their turn among the bulk."""
    x = torch.randn(200_000)
    x[5000:6000] += 100
    exact, bulk, times = split(x)
    counted = int((exact > 50).sum()) + times * int((bulk > 50).sum())
    assert counted == pytest.approx(1000, rel=0.05)
    assert set(x.topk(20).values.tolist()) <= set(exact.tolist())


def test_a_dense_end_leaves_room_for_the_other() -> None:
    """SiLU: hundreds of values at its minimum, a thin tail above."""
    x = torch.nn.functional.silu(3 * torch.randn(200_000))
    exact, _, _ = split(x)
    assert set(x.topk(20).values.tolist()) <= set(exact.tolist())


@pytest.mark.parametrize("size", [*SIZES, 1_000_000])
@pytest.mark.parametrize("kind", ["randn", "relu", "negative"])
def test_memory_that_numpy_cannot_read_gives_the_same(size: int, kind: str) -> None:
    x = torch.randn(size)
    x = {"randn": x, "relu": x.relu(), "negative": -x.abs()}[kind]
    negated = torch.complex(torch.zeros(size), -x).conj().imag  # x, by a bit that says so
    assert negated.is_neg()
    assert torch.equal(negated, x)
    for one, two in zip(sample_values(x).counted, sample_values(negated).counted, strict=True):
        assert one.times == two.times
        pair = (part.values.nan_to_num(9) for part in (one, two))
        assert torch.equal(*pair)


def test_saturated_values_are_bulk() -> None:
    x = (torch.randn(100_000) * 4).clamp(0, 6)
    exact, bulk, _times = split(x)
    assert len(exact) == 0
    share = float((bulk == 6).float().mean())
    assert share == pytest.approx(float((x == 6).float().mean()), abs=0.02)


@pytest.mark.parametrize("sign", [1, -1])
def test_signs_are_kept(sign: int) -> None:
    exact, bulk, _ = split(sign * torch.randn(100_000).abs())
    assert bool((sign * exact > 0).all() and (sign * bulk >= 0).all())
    assert len(exact) < 3 * TAIL[0]


def test_values_in_the_last_unfinished_row() -> None:
    x = torch.randn(100_003)
    x[-1], x[-2] = 50, -60
    taken = sample_values(x)
    assert (taken.low, taken.high) == (-60, 50)
    exact, _, _ = split(x)
    assert {-60.0, 50.0} <= set(exact.tolist())


@pytest.mark.parametrize("place", [0, 70_000, -1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_that_is_not_finite(place: int, value: float) -> None:
    x = torch.randn(100_003)
    x[place] = value
    taken = sample_values(x)
    assert taken.ignored == 1
    assert (taken.low, taken.high) == (x[x.isfinite()].min(), x[x.isfinite()].max())


def test_what_is_not_finite_is_left_out() -> None:
    x = torch.randn(100_000)
    x[::10_000] = float("nan")
    taken, clean = sample_values(x), sample_values(x[x.isfinite()])
    assert taken.ignored == 10
    assert (taken.low, taken.high) == (clean.low, clean.high)
    for one, two in zip(taken.counted, clean.counted, strict=True):
        assert torch.equal(one.values.nan_to_num(9), two.values.nan_to_num(9))


def test_copies_are_taken() -> None:
    for size in (100, 100_000):
        x = torch.randn(size)
        taken = sample_values(x).counted
        before = [part.values.clone() for part in taken]
        x.zero_()
        for one, part in zip(before, taken, strict=True):
            assert torch.equal(one.nan_to_num(9), part.values.nan_to_num(9))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_dense_memory_is_read_as_it_lies(layout: torch.memory_format) -> None:
    x = torch.randn(2, 32, 40, 40).contiguous(memory_format=layout)
    stored = torch.empty(0).set_(x.untyped_storage(), 0, (x.numel(),))
    for one, two in zip(sample_values(x).counted, sample_values(stored).counted, strict=True):
        assert torch.equal(one.values.nan_to_num(9), two.values.nan_to_num(9))


def test_views_with_gaps() -> None:
    x = torch.randn(4, 64, 50, 50)[:, ::2]
    taken = sample_values(x)
    assert (taken.low, taken.high) == (x.min(), x.max())


def test_the_same_batch_is_taken_in_the_same_way() -> None:
    x = torch.randn(3, 100, 700)
    one, two = HistogramObserver(), HistogramObserver()
    one(x), one(2 * x), two(2 * x.clone()), two(x.clone())
    for key, value in one.state_dict().items():
        assert torch.equal(two.state_dict()[key], value), key


@pytest.mark.parametrize("size", [20_000, 400_000])
def test_extremes_of_many_batches_are_those_of_min_max(size: int) -> None:
    histogram, extremes = HistogramObserver(), MinMaxObserver()
    for seed in range(4):
        x = torch.randn(size, generator=torch.Generator().manual_seed(seed)) ** 3
        histogram(x), extremes(x)
    assert (histogram.min_val, histogram.max_val) == (extremes.min_val, extremes.max_val)
