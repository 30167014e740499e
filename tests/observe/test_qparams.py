from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.ao.quantization.utils import calculate_qmin_qmax, get_qparam_dict, to_underlying_dtype

from backquant import observe
from backquant.errors import ConfigError
from backquant.observe import (
    QuantRange,
    affine_qparams,
    qparam_dict,
    quantize_bounds,
    resolve_range,
    storage_dtype,
)
from backquant.observe.qparams import array_qparams

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
    torch.float8_e5m2,
    torch.float8_e4m3fn,
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
    """The same ranges are refused, and the others come out the same."""
    try:
        observer = torch.ao.quantization.MinMaxObserver.__mro__[1]
        observer._validate_qmin_qmax(None, low, high)  # type: ignore[attr-defined]
        expected = calculate_qmin_qmax(low, high, True, dtype, reduce_range)
    except AssertionError:
        with pytest.raises(ConfigError):
            resolve_range(dtype, low, high, reduce_range)
    else:
        assert resolve_range(dtype, low, high, reduce_range) == tuple(expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_storage_equals_the_oracle(dtype: torch.dtype) -> None:
    assert storage_dtype(dtype) == to_underlying_dtype(dtype)


def test_storage_of_a_float_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="no quantized storage"):
        storage_dtype(torch.float32)


finite = st.floats(-(2.0**100), 2.0**100, width=32)
PER_TENSOR = [torch.per_tensor_affine, torch.per_tensor_symmetric]
PER_CHANNEL = [
    torch.per_channel_affine,
    torch.per_channel_symmetric,
    torch.per_channel_affine_float_qparams,
]


def _oracle_qparams(
    observer: Any, low: torch.Tensor, high: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    observer.min_val, observer.max_val = low, high
    return observer.calculate_qparams()  # type: ignore[no-any-return]


@settings(max_examples=300)
@given(
    ends=st.tuples(finite, finite).map(sorted),
    dtype=st.sampled_from(DTYPES),
    qscheme=st.sampled_from(PER_TENSOR),
    eps=st.sampled_from([2**-23, 2**-12, 0.5]),
    bounds=st.sampled_from([None, (0, 127), (-127, 127), (0, 15), (-8, 7), (0, 255)]),
    reduce_range=st.booleans(),
)
def test_per_tensor_qparams_equal_the_oracle(
    ends: list[float],
    dtype: torch.dtype,
    qscheme: torch.qscheme,
    eps: float,
    bounds: tuple[int, int] | None,
    reduce_range: bool,
    oracle: Callable[..., Any],
    assert_same_qparams: Callable[..., None],
) -> None:
    kwargs: dict[str, Any] = {"dtype": dtype, "qscheme": qscheme, "eps": eps}
    kwargs["reduce_range"] = reduce_range
    if bounds is not None:
        kwargs.update(quant_min=bounds[0], quant_max=bounds[1])
    if dtype == torch.quint8 and qscheme == torch.per_tensor_symmetric and reduce_range:
        with pytest.raises(ConfigError, match="reduced range"):
            observe.MinMaxObserver(**kwargs)
        return
    ours, theirs = observe.MinMaxObserver(**kwargs), oracle("MinMaxObserver", **kwargs)
    assert (ours.quant_min, ours.quant_max) == (theirs.quant_min, theirs.quant_max)
    low, high = torch.tensor(ends[0]), torch.tensor(ends[1])
    ours.min_val, ours.max_val = low, high
    assert_same_qparams(ours.calculate_qparams(), _oracle_qparams(theirs, low, high))


@settings(max_examples=200)
@given(
    ends=st.lists(st.tuples(finite, finite).map(sorted), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
    qscheme=st.sampled_from(PER_CHANNEL),
    eps=st.sampled_from([2**-23, 2**-12, 0.5]),
    bounds=st.sampled_from([None, (0, 127), (-127, 127), (0, 15)]),
)
def test_per_channel_qparams_equal_the_oracle(
    ends: list[list[float]],
    dtype: torch.dtype,
    qscheme: torch.qscheme,
    eps: float,
    bounds: tuple[int, int] | None,
    oracle: Callable[..., Any],
    assert_same_qparams: Callable[..., None],
) -> None:
    kwargs: dict[str, Any] = {"dtype": dtype, "qscheme": qscheme, "eps": eps}
    if bounds is not None:
        kwargs.update(quant_min=bounds[0], quant_max=bounds[1])
    ours = observe.PerChannelMinMaxObserver(**kwargs)
    theirs = oracle("PerChannelMinMaxObserver", **kwargs)
    low, high = torch.tensor([e[0] for e in ends]), torch.tensor([e[1] for e in ends])
    ours.min_val, ours.max_val = low, high
    assert_same_qparams(ours.calculate_qparams(), _oracle_qparams(theirs, low, high))


def test_affine_range_holds_zero_exactly() -> None:
    target = QuantRange(torch.quint8, torch.per_tensor_affine, 0, 255)
    scale, zero_point = affine_qparams(
        torch.tensor(1.0), torch.tensor(2.0), target, torch.tensor([1e-7])
    )
    assert zero_point.tolist() == [0]
    assert scale.item() == pytest.approx(2 / 255)


@pytest.mark.parametrize(
    "name",
    [
        "default_weight_observer",
        "default_per_channel_weight_observer",
        "default_float_qparams_observer",
        "default_placeholder_observer",
        "default_fused_per_channel_wt_fake_quant",
        "default_fixed_qparams_range_0to1_observer",
    ],
)
def test_qparam_dict_equals_the_oracle(name: str, oracle: Callable[..., Any]) -> None:
    x = torch.randn(4, 3)
    ours, theirs = getattr(observe, name)(), oracle(name)
    ours(x), theirs(x)
    mine, other = qparam_dict(ours), get_qparam_dict(theirs)
    assert mine.keys() == other.keys()
    for key, value in mine.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[key])
        else:
            assert value == other[key], key


@pytest.mark.parametrize("qscheme", [torch.per_tensor_affine, torch.per_tensor_symmetric])
@given(data=st.data())
def test_qparams_of_arrays_are_those_of_tensors(qscheme: torch.qscheme, data: Any) -> None:
    number = st.floats(-(2.0**90), 2.0**90, width=32)
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
