from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.ao.quantization.utils import get_qparam_dict

from backquant import observe
from backquant.errors import ConfigError
from backquant.observe import qparam_dict

# Not the 8-bit floats: PyTorch's observers measure for 0 to 15 then.
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


def _is_ours(dtype: torch.dtype, qscheme: torch.qscheme, bounds: tuple[int, int] | None) -> bool:
    """Different on purpose: ranges that the dtype does not hold are refused, and a symmetric range of
    uint16 that the user gave has its own middle."""
    if bounds is None:
        return False
    if dtype == torch.quint4x2 and bounds[1] - bounds[0] > 15:
        with pytest.raises(ConfigError, match="more than 16 values"):
            observe.MinMaxObserver(dtype=dtype, quant_min=bounds[0], quant_max=bounds[1])
        return True
    symmetric = (torch.per_tensor_symmetric, torch.per_channel_symmetric)
    return dtype == torch.uint16 and qscheme in symmetric


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
    if _is_ours(dtype, qscheme, bounds):
        return
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
    if _is_ours(dtype, qscheme, bounds):
        return
    ours = observe.PerChannelMinMaxObserver(**kwargs)
    theirs = oracle("PerChannelMinMaxObserver", **kwargs)
    low, high = torch.tensor([e[0] for e in ends]), torch.tensor([e[1] for e in ends])
    ours.min_val, ours.max_val = low, high
    assert_same_qparams(ours.calculate_qparams(), _oracle_qparams(theirs, low, high))


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
