"""Tables that interpolate, beside those that Arm's Vela 5.2 writes for the same function and scales."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from backquant.dtypes import interpolated_table

# ``create_lut_int16_op``: the input's scale, and the sha-256 of its 512 bases as 16-bit integers
VELA = {
    "sigmoid": (8, "49fd7320797665ac36e4971f076de33ade2bf23c7970baeb5d35ff3dda701d7e"),
    "tanh": (4, "06dd10a4c16ba240b0643bd88c069587c7f1bac4252b6893812f47d2c9d4e445"),
}


def table_of(function: Callable[[Tensor], Tensor], largest: int) -> Tensor:
    """Of 16-bit integers to 16-bit integers from -1 to 1."""

    def steps(places: Tensor) -> Tensor:
        return function(places * largest / 32768) * 32768 * 65536 / 65535

    return interpolated_table(steps, -32768, 65536, 513, (-32768, 32767))


@pytest.mark.parametrize("name", VELA)
def test_entries_are_velas(name: str) -> None:
    largest, digest = VELA[name]
    entries = table_of(getattr(torch, name), largest)[::128]
    assert hashlib.sha256(entries.numpy().astype(np.dtype("<i2")).tobytes()).hexdigest() == digest


@pytest.mark.parametrize("name", VELA)
def test_between_entries_are_lines(name: str) -> None:
    """Base and slope of the upper 9 bits, the lower 7 times the slope, rounded halves up."""
    table = table_of(getattr(torch, name), VELA[name][0])
    place = torch.arange(65536 - 128)
    base, behind = table[place & ~127], table[(place & ~127) + 128]
    line = base + (((behind - base) * (place & 127) + 64) >> 7)
    assert torch.equal(table[: 65536 - 128], line)
