"""Buffers whose length is known after the first batch only."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def with_shape(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    """``buffer`` itself, of this shape; where that changes it, its values are undefined afterwards.

    Memory is exchanged and not resized: what ``torch.load`` returns cannot be resized, and a tensor
    that failed to be points behind its memory.

    >>> import torch
    >>> buffer = torch.tensor([])
    >>> with_shape(buffer, (3,)) is buffer, buffer.shape
    (True, torch.Size([3]))
    """
    return buffer if buffer.shape == tuple(shape) else buffer.set_(buffer.new_empty(shape))  # type: ignore[call-overload]
