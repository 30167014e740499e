"""The channels of two halves in turn (ShuffleNet's shuffle), without a transposition byte by byte.

Two bytes side by side are one 16-bit number, ``left + 256 * right`` in the byte order of x86: made by
vectorised arithmetic, and the result stays channels last. The library of kernels (``backquant.native``) does
it in one pass, where it is here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch

from backquant.lower.kernels.prepared import is_plain
from backquant.lower.kernels.views import shown_as
from backquant.native.library import is_here


def shuffle(x: torch.Tensor, first: Sequence[int], last: Sequence[int]) -> torch.Tensor:
    """``x.reshape(first).transpose(1, 2).reshape(last)`` of integers.

    >>> x = torch.arange(4, dtype=torch.uint8).reshape(1, 4, 1, 1)
    >>> shuffle(x, (1, 2, 2, 1, 1), (1, 4, 1, 1)).flatten()
    tensor([0, 2, 1, 3], dtype=torch.uint8)
    """
    if not _takes_turns(x, first, last):
        return x.reshape(first).transpose(1, 2).reshape(last)
    if x.shape[1] > 2 and is_here():
        return torch.ops.backquant_kernels.shuffled.default(*x.chunk(2, 1))  # type: ignore[no-any-return]
    left, right = x.permute(0, 2, 3, 1).chunk(2, 3)
    pairs = left.to(torch.int16).add_(right.to(torch.int16), alpha=256)
    flat = pairs.as_strided((pairs.numel(),), (1,))
    _, channels, height, width = x.shape
    stride = (channels * height * width, 1, channels * width, channels)
    return shown_as(torch.empty(0, dtype=x.dtype), flat, x.size(), stride)


def _takes_turns(x: torch.Tensor, first: Sequence[int], last: Sequence[int]) -> bool:
    """Whether that is a shuffle of images that are channels last."""
    is_image = is_plain(x) and x.dim() == 4 and x.dtype == torch.uint8
    if not is_image or sys.byteorder != "little":
        return False
    is_last = x.is_contiguous(memory_format=torch.channels_last)
    return is_last and swaps_halves(x, first, last)


def swaps_halves(x: torch.Tensor, first: Sequence[int], last: Sequence[int]) -> bool:
    """Whether the reshapes of an image take the channels of both halves in turn.

    >>> swaps_halves(torch.ones(1, 4, 3, 3), (1, 2, 2, 3, 3), (1, -1, 3, 3))
    True
    """
    batch, channels, height, width = x.shape
    halves = (batch, 2, channels // 2, height, width)
    return channels % 2 == 0 and _is_size(first, halves) and _is_size(last, tuple(x.shape))


def _is_size(target: Sequence[int], size: tuple[int, ...]) -> bool:
    """Whether a tensor of ``size`` reshaped to ``target``, of which one may be -1, has that size."""
    if len(target) != len(size):
        return False
    return all(a in (n, -1) for a, n in zip(target, size, strict=True)) and size[1] != 0
