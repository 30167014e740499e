from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backquant.backend_config.import_paths import SpellingError
from backquant.backend_config.spelling import (
    constant_from,
    number_data,
    number_from,
)
from backquant.dtypes import dtype_name


@pytest.mark.parametrize(
    "dtype", [value for value in vars(torch).values() if isinstance(value, torch.dtype)]
)
def test_every_dtype_of_torch(dtype):
    assert constant_from(dtype_name(dtype), torch.dtype) is dtype
    assert constant_from(f"torch.{dtype_name(dtype)}", torch.dtype) is dtype


def test_unknown_dtype_and_qscheme():
    with pytest.raises(SpellingError, match='did you mean "quint8"'):
        constant_from("qunit8", torch.dtype)
    with pytest.raises(SpellingError, match='did you mean "per_tensor_affine"'):
        constant_from("per_tensor_afine", torch.qscheme)
    with pytest.raises(SpellingError, match="unknown dtype"):
        constant_from("add", torch.dtype)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(-1074, 1023).map(lambda exponent: math.ldexp(1.0, exponent))
)
def test_numbers_come_back_exactly(value):
    again = number_from(number_data(value))
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_json_cannot_carry(value):
    with pytest.raises(SpellingError, match="not a finite number"):
        number_data(value)


def test_powers_outside_of_a_float():
    with pytest.raises(SpellingError, match="outside of the range of a float"):
        number_from("2**5000")
