"""What observers measure, by the library: one look at each value. Without it numpy and PyTorch do."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from backquant.native import library

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
_NOT_FINITE = -1


def sampled(
    flat: Tensor, cut: Sequence[int], number: int
) -> tuple[float, float, Tensor, Tensor] | None:
    """The extremes of ``flat`` (float32 ``[n]``, on the CPU), its values of the tails, and every
    n-th value (float32 ``[number]``), NaN for those of the tails; None where a value is not finite.

    ``cut``: columns, how many values they hold, groups, those of the tail, n
    (``observe/histogram_sample.py``). The library must be here (``library.is_here``).

    >>> if library.is_here():
    ...     low, high, _, _ = sampled(torch.arange(9000.0), (512, 8704, 512, 16, 7), 1286)
    ...     assert (low, high) == (0.0, 8999.0)
    """
    flat = flat.contiguous()
    bulk, large, ends = flat.new_empty(number), torch.empty_like(flat), (ctypes.c_float * 2)()
    found = _functions()[0](
        flat.data_ptr(), flat.numel(), (_LONG * 5)(*cut), bulk.data_ptr(), large.data_ptr(), ends
    )
    if found == _NOT_FINITE:
        return None
    return ends[0], ends[1], large[:found].clone(), bulk


def count(values: Tensor, times: int, bits: tuple[int, int], least: int, sums: Tensor) -> None:
    """Add ``values`` (float32 ``[k]``, on the CPU), each ``times``, to ``sums`` (int64 ``[n, 3]``,
    contiguous).

    ``bits``: of the mantissa in a key, and of a position in a bin; ``least``: the key of the second row of
    ``sums`` (``observe/histogram_grid.py``). The library must be here.
    """
    values = values.resolve_neg().contiguous()  # to be kept while it is read
    _functions()[1](
        values.data_ptr(), values.numel(), times, *bits, least, len(sums) - 2, sums.data_ptr()
    )


@cache
def _functions() -> tuple[Any, Any]:
    """Those of the library that runs in this process."""
    held = library.held()
    sample, counts = held.backquant_sample, held.backquant_count
    sample.argtypes, sample.restype = [_POINTER, _LONG, *[_POINTER] * 4], _LONG
    counts.argtypes = [_POINTER, _LONG, _LONG, _INT, _INT, _LONG, _LONG, _POINTER]
    counts.restype = None
    return sample, counts
