"""Quantization schemes: per tensor or per channel, affine or symmetric; as tensors they travel in files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from backquant.dtypes.table import known_dtypes, qdtype
from backquant.errors import ConfigError

_PER_TENSOR = frozenset({torch.per_tensor_affine, torch.per_tensor_symmetric})
_PER_CHANNEL = frozenset(
    {
        torch.per_channel_affine,
        torch.per_channel_symmetric,
        torch.per_channel_affine_float_qparams,
    }
)
_SYMMETRIC = frozenset({torch.per_tensor_symmetric, torch.per_channel_symmetric})
# The codes are part of the file format: they are only ever added to.
_QSCHEMES: dict[int, torch.qscheme | None] = {
    0: None,
    1: torch.per_tensor_affine,
    2: torch.per_tensor_symmetric,
    3: torch.per_channel_affine,
    4: torch.per_channel_symmetric,
    5: torch.per_channel_affine_float_qparams,
}
_CODES = {qscheme: code for code, qscheme in _QSCHEMES.items()}


def is_per_tensor(qscheme: Any) -> bool:
    """Whether one scale serves the whole tensor.

    >>> is_per_tensor(torch.per_tensor_symmetric)
    True
    """
    return qscheme in _PER_TENSOR


def is_per_channel(qscheme: Any) -> bool:
    """Whether every channel has its own scale.

    >>> is_per_channel(torch.per_tensor_symmetric)
    False
    """
    return qscheme in _PER_CHANNEL


def is_symmetric(qscheme: Any) -> bool:
    """Whether the zero point is fixed at the middle of the range.

    >>> is_symmetric(torch.per_channel_symmetric)
    True
    """
    return qscheme in _SYMMETRIC


def encode_schemes(schemes: Sequence[tuple[Any, ...]]) -> torch.Tensor:
    """One row ``[qscheme, dtype, axis, quant_min, quant_max]`` per weight, int64: a ``state_dict`` holds
    nothing but tensors.

    >>> encode_schemes([(torch.per_channel_affine, torch.qint8, 0, -127, 127)])
    tensor([[   3,    3,    0, -127,  127]])
    """
    rows = [[_CODES[qscheme], qdtype(dtype).code, *numbers] for qscheme, dtype, *numbers in schemes]
    return torch.tensor(rows, dtype=torch.int64)


def decode_schemes(state: torch.Tensor) -> list[tuple[Any, ...]]:
    """The inverse of ``encode_schemes``; ``ConfigError`` on anything else.

    >>> decode_schemes(torch.tensor([[3, 3, 0, -127, 127]]))
    [(torch.per_channel_affine, torch.qint8, 0, -127, 127)]
    """
    readable = isinstance(state, torch.Tensor) and state.dim() == 2 and state.shape[1] == 5
    rows = state.tolist() if readable else []
    dtypes = {row.code: row.token for row in known_dtypes()}
    if not rows or any(row[0] not in _QSCHEMES or row[1] not in dtypes for row in rows):
        raise ConfigError(
            "the schemes of weights in the state_dict cannot be read",
            where=f"weight_qscheme, weight_dtype, … = {state!r}",
            fix="load a state_dict that a reference module of backquant wrote; a dtype that a program "
            "registers has to be registered here, too",
        )
    return [(_QSCHEMES[row[0]], dtypes[row[1]], *row[2:]) for row in rows]
