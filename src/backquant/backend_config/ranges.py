"""What a dtype token can hold."""

from __future__ import annotations

import torch

__all__ = ["integer_range"]

_PACKED = {torch.quint4x2: (0, 15), torch.quint2x4: (0, 3)}


def integer_range(dtype: torch.dtype | None) -> tuple[int, int] | None:
    """Smallest and largest value of one element; None for what holds no integers.

    >>> integer_range(torch.qint8), integer_range(torch.quint4x2), integer_range(torch.float16)
    ((-128, 127), (0, 15), None)
    """
    if dtype is None or dtype.is_floating_point or dtype.is_complex or dtype is torch.bool:
        return None
    if dtype in _PACKED:
        return _PACKED[dtype]
    name = str(dtype).removeprefix("torch.")
    bits = name.removeprefix("u").removeprefix("int")
    if bits in ("1", "2", "3", "4", "5", "6", "7"):
        count = 2 ** int(bits)
        return (0, count - 1) if name.startswith("u") else (-count // 2, count // 2 - 1)
    try:
        info = torch.iinfo(dtype)
    except TypeError:  # bits8 and the like hold no numbers
        return None
    return info.min, info.max
