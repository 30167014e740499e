"""Dtypes as messages, reports and files write them."""

from __future__ import annotations

import torch


def dtype_name(dtype: torch.dtype | None) -> str:
    """``quint8`` for ``torch.quint8``; ``any dtype`` for None.

    >>> dtype_name(torch.quint8), dtype_name(torch.float), dtype_name(None)
    ('quint8', 'float32', 'any dtype')
    """
    return "any dtype" if dtype is None else str(dtype).removeprefix("torch.")
