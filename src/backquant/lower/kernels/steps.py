"""Floats to 8-bit integers by the library of kernels (``backquant.native``), where it is here.

A whole number of steps, then the zero point: the integers of the reference model, also halfway between two.
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


def _is_dense(x: torch.Tensor) -> bool:
    if x.is_contiguous():
        return True
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
