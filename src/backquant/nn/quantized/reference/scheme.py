"""A weight's scheme as an int64 tensor, so that a ``state_dict`` holds nothing but tensors.

The codes are part of the file format: they are only ever added to.
"""

from __future__ import annotations

import torch

from backquant.errors import ConfigError

__all__ = ["decode_scheme", "encode_scheme"]

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
}
_QSCHEME_CODES = {qscheme: code for code, qscheme in _QSCHEMES.items()}
_DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def encode_scheme(
    qscheme: torch.qscheme | None, dtype: torch.dtype, numbers: tuple[int, int, int]
) -> torch.Tensor:
    """``[qscheme, dtype, axis, quant_min, quant_max]`` as five int64 values.

    >>> encode_scheme(torch.per_channel_affine, torch.qint8, (0, -127, 127))
    tensor([   3,    3,    0, -127,  127])
    """
    return torch.tensor([_QSCHEME_CODES[qscheme], _DTYPE_CODES[dtype], *numbers])


def decode_scheme(
    state: torch.Tensor,
) -> tuple[torch.qscheme | None, torch.dtype, tuple[int, int, int]]:
    """The inverse of ``encode_scheme``; ``ConfigError`` on anything else.

    >>> decode_scheme(torch.tensor([3, 3, 0, -127, 127]))
    (torch.per_channel_affine, torch.qint8, (0, -127, 127))
    """
    codes = state.tolist() if isinstance(state, torch.Tensor) and state.shape == (5,) else None
    if codes is None or codes[0] not in _QSCHEMES or codes[1] not in _DTYPES:
        raise ConfigError(
            "the weight's scheme in the state_dict cannot be read",
            where=f"_extra_state = {state!r}",
            fix="load a state_dict that a reference module of backquant wrote",
        )
    return _QSCHEMES[codes[0]], _DTYPES[codes[1]], (codes[2], codes[3], codes[4])
