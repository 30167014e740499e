"""Schemes as tensors."""

from __future__ import annotations

import itertools

import pytest
import torch

from backquant.dtypes import decode_schemes, encode_schemes
from backquant.errors import ConfigError


def test_round_trip_of_every_scheme() -> None:
    qschemes = [
        torch.per_tensor_affine,
        torch.per_tensor_symmetric,
        torch.per_channel_affine,
        torch.per_channel_symmetric,
        torch.per_channel_affine_float_qparams,
        None,
    ]
    dtypes = [torch.qint8, torch.quint8, torch.quint4x2, torch.qint32, torch.int8, torch.float16]
    schemes = [(q, d, 1, -3, 7) for q, d in itertools.product(qschemes, dtypes)]
    assert decode_schemes(encode_schemes(schemes)) == schemes


def test_codes_do_not_change() -> None:
    """They are in saved files."""
    scheme = (torch.per_channel_affine_float_qparams, torch.quint4x2, 0, 0, 15)
    assert encode_schemes([scheme]).tolist() == [[5, 7, 0, 0, 15]]


@pytest.mark.parametrize(
    "state", [torch.zeros(5), torch.full((1, 5), 99), torch.zeros(1, 4), {"qscheme": 1}]
)
def test_anything_else_is_refused(state: object) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        decode_schemes(state)  # type: ignore[arg-type]
