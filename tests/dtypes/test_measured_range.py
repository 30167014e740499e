from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.ao.quantization.utils import calculate_qmin_qmax

from backquant.dtypes import (
    QuantRange,
    affine_qparams,
    array_qparams,
    quantize_bounds,
    resolve_range,
)
from backquant.errors import ConfigError

DTYPES = [
    torch.qint8,
    torch.quint8,
    torch.quint4x2,
    torch.qint32,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.uint16,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce_range", [False, True])
def test_bounds_equal_the_oracle(dtype: torch.dtype, reduce_range: bool) -> None:
    expected = calculate_qmin_qmax(None, None, False, dtype, reduce_range)  # type: ignore[arg-type]
    assert quantize_bounds(dtype, reduce_range) == tuple(expected)
    assert resolve_range(dtype, None, None, reduce_range) == tuple(expected)


@given(
    low=st.integers(-(2**31), 300),
    high=st.integers(-300, 2**31),
    dtype=st.sampled_from(DTYPES),
    reduce_range=st.booleans(),
)
def test_custom_ranges_equal_the_oracle(
    low: int, high: int, dtype: torch.dtype, reduce_range: bool
) -> None:
    """The same ranges are refused, and the others come out the same; PyTorch looks at the width of four
    dtypes only, and lets the others wrap."""
    try:
        observer = torch.ao.quantization.MinMaxObserver.__mro__[1]
        observer._validate_qmin_qmax(None, low, high)  # type: ignore[attr-defined]
        expected = calculate_qmin_qmax(low, high, True, dtype, reduce_range)
    except AssertionError:
        expected = None
    if expected is None or high - low > quantize_bounds(dtype)[1] - quantize_bounds(dtype)[0]:
        with pytest.raises(ConfigError):
            resolve_range(dtype, low, high, reduce_range)
    else:
        assert resolve_range(dtype, low, high, reduce_range) == tuple(expected)


def test_affine_range_holds_zero_exactly() -> None:
    target = QuantRange(torch.quint8, torch.per_tensor_affine, 0, 255)
    scale, zero_point = affine_qparams(
        torch.tensor(1.0), torch.tensor(2.0), target, torch.tensor([1e-7])
    )
    assert zero_point.tolist() == [0]
    assert scale.item() == pytest.approx(2 / 255)


@pytest.mark.parametrize("qscheme", [torch.per_tensor_affine, torch.per_tensor_symmetric])
@given(data=st.data())
def test_qparams_of_arrays_are_those_of_tensors(qscheme: torch.qscheme, data: Any) -> None:
    number = st.floats(width=32, allow_nan=False, allow_infinity=False)
    ends = data.draw(st.lists(st.tuples(number, number).map(sorted), min_size=1, max_size=8))
    dtype, bounds = data.draw(
        st.sampled_from(
            [(torch.quint8, (0, 255)), (torch.qint8, (-128, 127)), (torch.uint8, (0, 127))]
        )
    )
    target = QuantRange(dtype, qscheme, *bounds, customized=data.draw(st.booleans()))
    low, high = torch.tensor(ends).unbind(1)
    scale, zero_point = affine_qparams(low, high, target, torch.tensor([1e-7]))
    found = array_qparams(low.numpy(), high.numpy(), target, torch.tensor(1e-7).item())
    assert found[0].dtype == np.float32
    assert found[0].tolist() == scale.tolist()
    assert found[1].tolist() == zero_point.tolist()
    for bound in bounds:  # ranges wider than the largest float, too
        assert bool(((bound - zero_point) * scale).isfinite().all())


def test_the_largest_scales_are_divided_like_those_of_arrays() -> None:
    """``number / tensor`` is two roundings in PyTorch, one in NumPy."""
    target = QuantRange(torch.uint8, torch.per_tensor_affine, 0, 127)
    low, high = torch.zeros(1), torch.tensor([torch.finfo(torch.float32).max])
    scale, _ = affine_qparams(low, high, target, torch.tensor([1e-7]))
    found, _ = array_qparams(low.numpy(), high.numpy(), target, 1e-7)
    assert found.tolist() == scale.tolist()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("qscheme", [torch.per_tensor_affine, torch.per_tensor_symmetric])
def test_narrow_floats_use_their_whole_range(dtype: torch.dtype, qscheme: torch.qscheme) -> None:
    """PyTorch's observers measure for 0 to 15, with a zero point that 8-bit floats have not."""
    limit = int(torch.finfo(dtype).max)
    bounds = resolve_range(dtype, None, None, False)
    assert bounds == (-limit, limit)
    target = QuantRange(dtype, qscheme, *bounds)
    ends = torch.tensor(-3.0), torch.tensor(1.0)
    scale, zero_point = affine_qparams(*ends, target, torch.tensor([1e-7]))
    assert scale.item() == pytest.approx(3.0 / limit) and zero_point.tolist() == [0]
    assert array_qparams(*(end.numpy() for end in ends), target, 1e-7)[0] == scale.item()


def test_symmetric_ranges_of_unsigned_dtypes_have_their_middle() -> None:
    """PyTorch's observers give uint16 the zero point 2**15 outside of a narrower range, too."""
    for dtype, bounds, customized, expected in [
        (torch.uint16, (0, 65535), False, 32768),
        (torch.uint16, (0, 1000), True, 500),
        (torch.quint8, (0, 127), True, 63),
        (torch.quint4x2, (0, 15), False, 0),
        (torch.int16, (-100, 100), True, 0),
    ]:
        target = QuantRange(dtype, torch.per_tensor_symmetric, *bounds, customized=customized)
        assert target.symmetric_zero_point == expected
