"""Floats to 8-bit integers, and these to others by a table, by the library of kernels (``backquant.native``),
where it is here.

Floats become a whole number of steps, then comes the zero point: the integers of the reference model, also
halfway between two.
"""

from __future__ import annotations

import torch

from backquant.lower.kernels.prepared import is_plain
from backquant.native.library import is_here


def quantized(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor | None:
    """float32 ``x`` as uint8 in the same memory format; None for what the library does not compute.

    >>> quantized(torch.ones(2, dtype=torch.float64), 0.5, 0) is None
    True
    """
    if x.dtype != torch.float32 or not is_plain(x) or not _is_dense(x) or not is_here():
        return None
    return torch.ops.backquant_kernels.quantized.default(x, scale, zero_point)  # type: ignore[no-any-return]


def looked_up(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor | None:
    """The entry of ``table`` (uint8, 256 of them) for each integer of ``x`` (uint8), in its memory format;
    None for what the library does not compute.

    >>> looked_up(torch.ones(2), torch.zeros(256, dtype=torch.uint8)) is None  # floats
    True
    """
    if not (x.dtype == table.dtype == torch.uint8) or not is_plain(x) or not _is_dense(x):
        return None
    return torch.ops.backquant_kernels.looked_up.default(x, table) if is_here() else None


def _is_dense(x: torch.Tensor) -> bool:
    if x.is_contiguous():
        return True
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
