from __future__ import annotations

import pytest
import torch
from torch.ao.quantization.utils import to_underlying_dtype

from backquant.dtypes import (
    find_dtype,
    integer_range,
    is_narrow_float,
    is_quantized,
    is_scaled_float,
    known_dtypes,
    plain_dtype,
    qdtype,
    storage_dtype,
    tensor_token,
)
from backquant.dtypes.table import E2M1, INT2, INT3, INT4, UINT2, UINT3, UINT4
from backquant.errors import ConfigError

QUANTIZED = [row.token for row in known_dtypes() if row.has_scale]


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.quint2x4, (0, 3)),
        (torch.int4, (-8, 7)),
        (torch.uint4, (0, 15)),
        (torch.int1, (-1, 0)),
        (torch.int16, (-32768, 32767)),
        (torch.uint16, (0, 65535)),
        (torch.qint32, (-(2**31), 2**31 - 1)),
        (torch.int64, (-(2**63), 2**63 - 1)),
        (torch.bool, None),
        (torch.complex64, None),
        (torch.float8_e4m3fn, None),
        (torch.bits8, None),
        (None, None),
    ],
)
def test_integer_range(dtype: torch.dtype | None, expected: tuple[int, int] | None) -> None:
    assert integer_range(dtype) == expected


# PyTorch has no storage for quint2x4, and none for the tokens of few bits without operators
_WITHOUT_STORAGE = (torch.quint2x4, INT2, INT3, INT4, UINT2, UINT3, UINT4, E2M1)


@pytest.mark.parametrize("dtype", [token for token in QUANTIZED if token not in _WITHOUT_STORAGE])
def test_storage_equals_the_oracle(dtype: torch.dtype) -> None:
    assert storage_dtype(dtype) == to_underlying_dtype(dtype)


def test_storage_of_a_float_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="no quantized storage"):
        storage_dtype(torch.float32)


def test_a_storage_is_plain_and_holds_the_range() -> None:
    for row in known_dtypes():
        assert plain_dtype(row.token) == row.storage == plain_dtype(row.storage)
        held = torch.tensor([row.low, row.high], dtype=torch.float64).to(row.storage).double()
        assert held.tolist() == [row.low, row.high] or not row.has_scale


def test_numbers_in_files_are_those_of_the_first_release() -> None:
    """They may not change: saved modules hold them."""
    assert [row.name for row in sorted(known_dtypes(), key=lambda row: row.code)][:13] == [
        *(
            "float32",
            "float16",
            "bfloat16",
            "qint8",
            "int8",
            "quint8",
            "uint8",
            "quint4x2",
            "int16",
        ),
        *("qint32", "int32", "float8_e4m3fn", "float8_e5m2"),
    ]
    assert len({row.code for row in known_dtypes()}) == len(known_dtypes())


def test_kinds() -> None:
    for row in known_dtypes():
        kinds = is_quantized(row.token), is_scaled_float(row.token), is_narrow_float(row.token)
        assert kinds == (
            row.token not in (torch.float32, torch.float16, torch.bfloat16),
            row.token in (torch.float8_e4m3fn, torch.float8_e5m2, E2M1),
            row.token in (torch.float16, torch.bfloat16),
        )


def test_quantized_tensors_of_a_storage_are_made_by_torch() -> None:
    for storage in (torch.uint8, torch.int8, torch.int32):
        made = torch.quantize_per_tensor(torch.ones(2), 0.5, 0, tensor_token(storage))
        assert made.int_repr().dtype == storage


def test_what_has_no_row() -> None:
    assert find_dtype(None) is None and find_dtype(torch.int64) is None
    with pytest.raises(ConfigError, match="not in the table"):
        qdtype(torch.uint5)
