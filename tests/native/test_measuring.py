"""The library measures what numpy and PyTorch measure, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from backquant.observe import HistogramObserver, histogram_grid
from backquant.observe import histogram as histogram_sample
from backquant.observe.histogram_grid import Counted

pytestmark = pytest.mark.usefixtures("native_library")

KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two ends": lambda x: x,
    "one end": torch.relu,
    "the other end": lambda x: -x.abs(),
    "a dense end": lambda x: F.silu(3 * x),
    "unequal ends": lambda x: x.exp() - 1.5,
    "zeros": torch.zeros_like,
    "one value": lambda x: torch.full_like(x, -3.0),
}
SIZES = (4097, 5000, 9999, 65_536, 100_352, 262_145)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_the_same_values_are_taken(size: int, kind: str) -> None:
    x = KINDS[kind](torch.randn(size, generator=torch.Generator().manual_seed(size)))
    expected = histogram_sample._of_many(x.numpy())
    found = histogram_sample._of_many_on_cpu(x)
    assert expected is not None
    assert found is not None
    assert found[:3] == expected[:3]
    for mine, theirs in zip(found.counted, expected.counted, strict=True):
        assert mine.times == theirs.times
        torch.testing.assert_close(mine.values, theirs.values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 5000, -1])
def test_what_is_not_finite_is_told(value: float, place: int) -> None:
    x = torch.randn(9999)
    x[place] = value
    assert histogram_sample._of_many_on_cpu(x) is None


@pytest.mark.parametrize("mantissa", [0, 2, 7, 10])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bins_are_filled(kind: str, mantissa: int) -> None:
    x = KINDS[kind](torch.randn(20_000, generator=torch.Generator().manual_seed(1)))
    x[3], x[4] = math.nan, -0.0
    keys = tuple(histogram_grid._key_of(end, mantissa) for end in (-math.inf, math.inf))
    parts = [(x[:300], 1), (x[300:9000], 13), (x[9000:], 7)]
    expected, found = (
        way([Counted(part.clone(), times) for part, times in parts], mantissa, *keys).bins()
        for way in (histogram_grid._counted, histogram_grid._counted_by_library)
    )
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second": lambda x: x[::2],
    "every second column": lambda x: x.view(200, 100)[:, ::2],
    "one value, expanded": lambda x: x[:1].expand(9000),
    "transposed": lambda x: x.view(100, 200).t(),
    "negated in name": lambda x: torch.view_as_complex(x.view(-1, 2)).conj().imag,
}


@pytest.mark.parametrize("kind", STRIDED)
def test_memory_with_gaps(kind: str) -> None:
    x = STRIDED[kind](torch.randn(20_000, generator=torch.Generator().manual_seed(2)))
    found = HistogramObserver()
    found(x)
    assert (found.min_val, found.max_val) == (x.min(), x.max())
    same = HistogramObserver()
    same(x.resolve_neg().clone(memory_format=torch.contiguous_format))
    if kind != "transposed":  # sampled in the order of memory
        for mine, theirs in zip(found.state, same.state, strict=True):
            assert torch.equal(mine, theirs)


def test_whatever_dtype_is_the_default() -> None:
    x = torch.randn(9000)
    expected = histogram_sample._of_many_on_cpu(x)
    assert expected is not None
    torch.set_default_dtype(torch.float64)
    try:
        found = histogram_sample._of_many_on_cpu(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found is not None
    for mine, theirs in zip(found.counted, expected.counted, strict=True):
        torch.testing.assert_close(mine.values, theirs.values, rtol=0, atol=0, equal_nan=True)
