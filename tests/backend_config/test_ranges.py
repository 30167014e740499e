from __future__ import annotations

import pytest
import torch

from backquant.backend_config.ranges import integer_range


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.quint2x4, (0, 3)),
        (torch.int4, (-8, 7)),
        (torch.uint4, (0, 15)),
        (torch.int1, (-1, 0)),
        (torch.int16, (-32768, 32767)),
        (torch.qint32, (-(2**31), 2**31 - 1)),
        (torch.bool, None),
        (torch.complex64, None),
        (torch.float8_e4m3fn, None),
        (torch.bits8, None),
        (None, None),
    ],
)
def test_integer_range(dtype, expected):
    assert integer_range(dtype) == expected
