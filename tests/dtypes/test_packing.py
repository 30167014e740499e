"""Integers of 2, 3 and 4 bits: lossless, of any shape, and nothing else is read back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from backquant.dtypes import bits_of_values, pack_integers, unpack_integers
from backquant.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_round_trip(dtype: torch.dtype, bits: int) -> None:
    low = -(1 << (bits - 1)) if dtype == torch.int8 else 0
    x = torch.randint(low, low + (1 << bits), (7, 9), dtype=dtype)
    x[0, :2] = torch.tensor([low, low + (1 << bits) - 1])
    assert bits_of_values(x) == bits
    packed = pack_integers(x, bits)
    assert packed.numel() == -(-x.numel() * bits // 8)
    assert torch.equal(unpack_integers(packed, bits, [7, 9], dtype), x)


def test_what_does_not_fit_is_not_packed() -> None:
    assert bits_of_values(torch.full((99,), 8, dtype=torch.int8)) == 8
    assert bits_of_values(torch.zeros(4, dtype=torch.int8)) == 8  # too small to pay


def test_messages(snapshot: Callable[..., None]) -> None:
    packed = torch.tensor([0, 240], dtype=torch.uint8)
    errors = []
    for shape in ([9], [3]):
        with pytest.raises(ConfigError) as error:
            unpack_integers(packed, 4, shape, torch.int8)
        errors.append(str(error.value))
    snapshot("packing", "\n".join(errors))
