"""The schemes of weights as an int64 tensor, so that a ``state_dict`` holds nothing but tensors.

The codes are part of the file format: they are only ever added to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from backquant.errors import ConfigError

__all__ = ["decode_schemes", "encode_schemes"]

_QSCHEMES: dict[int, torch.qscheme | None] = {
    0: None,
    1: torch.per_tensor_affine,
    2: torch.per_tensor_symmetric,
    3: torch.per_channel_affine,
    4: torch.per_channel_symmetric,
    5: torch.per_channel_affine_float_qparams,
}
_DTYPES: dict[int, torch.dtype] = {
    0: torch.float32,
    1: torch.float16,
    2: torch.bfloat16,
    3: torch.qint8,
    4: torch.int8,
    5: torch.quint8,
    6: torch.uint8,
    7: torch.quint4x2,
    8: torch.int16,
    9: torch.qint32,
    10: torch.int32,
    11: torch.float8_e4m3fn,
    12: torch.float8_e5m2,
}
_QSCHEME_CODES = {qscheme: code for code, qscheme in _QSCHEMES.items()}
_DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def encode_schemes(schemes: Sequence[tuple[Any, ...]]) -> torch.Tensor:
    """One row ``[qscheme, dtype, axis, quant_min, quant_max]`` per weight, int64.

    >>> encode_schemes([(torch.per_channel_affine, torch.qint8, 0, -127, 127)])
    tensor([[   3,    3,    0, -127,  127]])
    """
    rows = [
        [_QSCHEME_CODES[qscheme], _DTYPE_CODES[dtype], *numbers]
        for qscheme, dtype, *numbers in schemes
    ]
    return torch.tensor(rows, dtype=torch.int64)


def decode_schemes(state: torch.Tensor) -> list[tuple[Any, ...]]:
    """The inverse of ``encode_schemes``; ``ConfigError`` on anything else.

    >>> decode_schemes(torch.tensor([[3, 3, 0, -127, 127]]))
    [(torch.per_channel_affine, torch.qint8, 0, -127, 127)]
    """
    readable = isinstance(state, torch.Tensor) and state.dim() == 2 and state.shape[1] == 5
    rows = state.tolist() if readable else []
    if not rows or any(row[0] not in _QSCHEMES or row[1] not in _DTYPES for row in rows):
        raise ConfigError(
            "the schemes of weights in the state_dict cannot be read",
            where=f"_extra_state = {state!r}",
            fix="load a state_dict that a reference module of backquant wrote",
        )
    return [(_QSCHEMES[row[0]], _DTYPES[row[1]], *row[2:]) for row in rows]
