"""Tables of functions of one value that hold fewer entries than there are integers, as accelerators have.

16-bit integers have tables of 513 entries in TensorFlow Lite and on Arm's Ethos-U: the upper bits of an
integer choose two neighbours, the lower bits a place between them. Each entry is moved by half of what the
line between two neighbours is off at its middle. Sources: TensorFlow Lite, ``kernels/internal/common.h``
(``gen_lut``, ``lut_lookup``); Arm's Vela, ``ethosu/vela/lut.py``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from backquant.dtypes.arithmetic import Rounding, round_to


def interpolated_table(
    function: Callable[[Tensor], Tensor], low: int, size: int, entries: int, ends: tuple[int, int]
) -> Tensor:
    """What a lookup table of so many entries returns for each of ``size`` integers from ``low``: int64
    ``[size, …]``.

    Args:
        function: maps integers of the input, as float64 ``[n]``, to values in steps of the result, as
            float64 ``[n, …]``.
        low, size: the range of the input; ``size`` is a power of two.
        entries: one more than a power of two that is at most ``size``.
        ends: the smallest and the largest entry.

    >>> sine = lambda places: 1000 * torch.sin(places / 16384)
    >>> table = interpolated_table(sine, -(2**15), 2**16, 513, (-1000, 1000))
    >>> table[[0, 40000]].tolist(), sine(torch.tensor([-32768.0, 7232])).round().tolist()
    ([-909, 428], [-909.0, 427.0])
    """
    pieces = entries - 1
    step = (size - 1) / pieces
    places = low + torch.arange(pieces, dtype=torch.float64) * step
    here, middle, behind = (function(places + part * step) for part in (0.0, 0.5, 1.0))
    whole = _rounded(here)
    bend = _rounded((behind + whole) / 2) - _rounded(middle)
    last = function(torch.tensor([low + size - 1], dtype=torch.float64))
    table = torch.cat([whole - _rounded(bend / 2), _rounded(last)]).clamp(*ends).to(torch.int64)
    return between_entries(table, size)


def between_entries(table: Tensor, size: int) -> Tensor:
    """``table`` (int64 ``[entries, …]``) interpolated at ``size`` places, halves up.

    >>> between_entries(torch.tensor([0, 10, 4]), 8).tolist()
    [0, 3, 5, 8, 10, 9, 7, 6]
    """
    shift = (size // (len(table) - 1)).bit_length() - 1
    places = torch.arange(size)
    index = places >> shift
    part = (places - (index << shift)).reshape(-1, *[1] * (table.dim() - 1))
    slope = table[index + 1] - table[index]
    return table[index] + ((slope * part + ((1 << shift) >> 1)) >> shift)


def _rounded(x: Tensor) -> Tensor:
    return round_to(x, Rounding.HALF_AWAY)
