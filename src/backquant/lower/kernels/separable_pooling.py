"""Max pooling over rows, then over columns, by ``aten::maximum``: for few channels.

``quantized::max_pool2d`` takes 32 channels at a time and what is left of them one by one, 14 times as
slowly (24 channels of 112×112: 0.52 ms, all of it for that rest); here every byte costs the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

_AT_A_TIME = 32  # channels
_REST = 7  # times as slow a channel of the rest is as one in ``separable_max_pool``
_TAPS = 3  # a larger window costs more


def is_separable(x: torch.Tensor, kernel_size: Sequence[int], padding: Sequence[int]) -> bool:
    """Whether the channels of ``x`` ``[batch, channels, height, width]`` are few, or few too many, and the
    window is small. Depends on the shape only.

    >>> window = ([3, 3], [1, 1])
    >>> [is_separable(torch.empty(1, n, 8, 8), *window) for n in (24, 32, 64, 72, 100)]
    [True, False, False, False, False]
    """
    if x.dim() != 4 or not x.numel() or max(kernel_size) > _TAPS:
        return False
    fits = all(n + 2 * p >= k for n, p, k in zip(x.shape[2:], padding, kernel_size, strict=True))
    return fits and (x.shape[1] % _AT_A_TIME) * _REST > x.shape[1]


def separable_max_pool(
    x: torch.Tensor, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> torch.Tensor:
    """``x`` uint8 or int8 ``[batch, channels, height, width]``; each list has two entries. The result is
    channels last.

    >>> x = torch.tensor([[[[1, 5, 0], [2, 3, 9]]]], dtype=torch.uint8)
    >>> separable_max_pool(x, [2, 2], [1, 1], [0, 0])
    tensor([[[[5, 9]]]], dtype=torch.uint8)
    """
    rows, columns = padding
    x = x.contiguous(memory_format=torch.channels_last)
    if rows or columns:
        lowest = torch.iinfo(x.dtype).min
        x = F.pad(x, (columns, columns, rows, rows), value=lowest)
    height, width = x.shape[2] - kernel_size[0] + 1, x.shape[3] - kernel_size[1] + 1
    tall = x[:, :, : height : stride[0]]
    for row in range(1, kernel_size[0]):
        tall = torch.maximum(tall, x[:, :, row : row + height : stride[0]])
    wide = tall[..., :width]
    for column in range(1, kernel_size[1]):
        wide = torch.maximum(wide, tall[..., column : column + width])
    return wide[..., :: stride[1]].contiguous(memory_format=torch.channels_last)
