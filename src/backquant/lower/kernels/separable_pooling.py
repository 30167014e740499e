"""Max pooling over rows, then over columns, by ``aten::maximum``: for few channels.

``quantized::max_pool2d`` takes 32 channels at a time and what is left of them one by one, 14 times as
slowly (24 channels of 112×112: 0.52 ms, all of it for that rest); here every byte costs the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

_AT_A_TIME = 32  # channels that torch's kernel pools together
_REST = 10  # how much longer each remaining channel takes there than in ``separable_max_pool``
_TAPS = 3  # the largest window that is pooled so; larger ones cost more


def is_separable(x: torch.Tensor, kernel_size: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether the channels of ``x`` ``[batch, channels, height, width]`` are few, or few too many, and the
    window is small. Depends on the shape only.

    >>> window = ([3, 3], [1, 1])
    >>> [is_separable(torch.empty(1, n, 8, 8), *window) for n in (24, 32, 64, 72, 100)]
    [True, False, False, True, False]
    """
    if max(kernel_size) > _TAPS or not has_windows(x, kernel_size, padding):
        return False
    return (x.shape[1] % _AT_A_TIME) * _REST > x.shape[1]


def has_windows(x: torch.Tensor, kernel_size: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether windows of this size fit into the images of ``x``, of which there is one at least.

    >>> [has_windows(torch.empty(1, 2, 3, 3), [size, size], [0, 0]) for size in (3, 4)]
    [True, False]
    """
    if x.dim() != 4 or not x.numel():
        return False
    return all(n + 2 * p >= k for n, p, k in zip(x.shape[2:], padding, kernel_size, strict=True))


# size: the arguments of quantized::max_pool2d without dilation.
def separable_max_pool(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
) -> torch.Tensor:
    """``x`` uint8 or int8 ``[batch, channels, height, width]``; each list has two entries. The result is
    channels last.

    >>> x = torch.tensor([[[[1, 5, 0], [2, 3, 9]]]], dtype=torch.uint8)
    >>> separable_max_pool(x, [2, 2], [1, 1], [0, 0], False)
    tensor([[[[5, 9]]]], dtype=torch.uint8)
    >>> separable_max_pool(x, [2, 2], [2, 2], [0, 0], True)
    tensor([[[[5, 9]]]], dtype=torch.uint8)
    """
    x = x.contiguous(memory_format=torch.channels_last)
    sizes = list(zip(x.shape[2:], kernel_size, stride, padding, strict=True))
    height, width = (_windows(*axis, ceil_mode) for axis in sizes)
    beyond = [
        (before, max(0, (count - 1) * step + taps - before - length))
        for (length, taps, step, before), count in zip(sizes, (height, width), strict=True)
    ]
    if any(map(any, beyond)):
        x = F.pad(x, (*beyond[1], *beyond[0]), value=torch.iinfo(x.dtype).min)
    tall = _maxima(x, 2, kernel_size[0], stride[0], height)
    wide = _maxima(tall, 3, kernel_size[1], stride[1], width)
    return wide.contiguous(memory_format=torch.channels_last)


def _windows(length: int, taps: int, step: int, padding: int, ceil_mode: bool) -> int:
    """How many windows an axis has. With ``ceil_mode`` the last may end beyond the padding, as long as it
    starts before the padding behind.

    >>> [_windows(7, 2, 2, 0, mode) for mode in (False, True)], _windows(5, 2, 3, 1, True)
    ([3, 4], 2)
    """
    free = length + 2 * padding - taps
    if not ceil_mode:
        return free // step + 1
    count = -(-free // step) + 1
    return count - 1 if (count - 1) * step >= length + padding else count


def _maxima(x: torch.Tensor, dim: int, taps: int, step: int, count: int) -> torch.Tensor:
    """The maxima of ``count`` windows of ``taps`` along ``dim``."""
    index = [slice(None)] * x.dim()
    parts = []
    for tap in range(taps):
        index[dim] = slice(tap, tap + (count - 1) * step + 1, step)
        parts.append(x[tuple(index)])
    found = parts[0]
    for part in parts[1:]:
        found = torch.maximum(found, part)
    return found
