"""Depthwise convolutions in float whose windows are too large for XNNPACK's kernels, as a sum of small ones.

XNNPACK has depthwise kernels of up to 25 taps. A larger window runs as a matrix product of one column for
each channel: of 7 × 7 the parts take half of that time (benchmarks/LOG.md). Values stay, but for the order of
the sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import torch

from backquant.deploy.edits import AtenCalls, replace
from backquant.operators import overload

__all__ = ["MOST_TAPS", "split_depthwise"]

#: Of the largest kernel that XNNPACK has for them.
MOST_TAPS = 25

_SLICE = overload("slice")


def split_depthwise(node: Any) -> None:
    """Replace ``node``, a convolution of images, if it is such a one and all sizes are known."""
    given = (*node.args, *(None, [1, 1], [0, 0], [1, 1], 1)[len(node.args) - 2 :])
    source, weight, bias, stride, padding, dilation, groups = given
    image, kernel = source.meta["val"], weight.meta["val"]
    height, width = kernel.shape[-2:]
    if weight.op != "placeholder" or kernel.dtype is not torch.float32 or image.dim() != 4:
        return
    if groups < 2 or groups != image.shape[1] or height * width <= MOST_TAPS:
        return
    if not all(isinstance(size, int) for size in image.shape):
        return
    write = AtenCalls(node)
    padded = source
    if any(padding):
        around = [padding[-1], padding[-1], padding[0], padding[0]]
        padded = write.call(overload("constant_pad_nd"), source, around, 0.0)
    sizes = node.meta["val"].shape[-2:]
    parts: list[Any] = []
    for rows, columns in _tiles(height, width):
        part, window = padded, weight
        for axis, (start, end) in ((2, rows), (3, columns)):
            step, gap = stride[axis - 2], dilation[axis - 2]
            first = start * gap
            last = first + (sizes[axis - 2] - 1) * step + (end - 1 - start) * gap + 1
            part = _cut(write, part, axis, first, last)
            window = _cut(write, window, axis, start, end)
        own = bias if not parts else None
        parts.append(write.call(node.target, part, window, own, stride, [0, 0], dilation, groups))
    replace(node, reduce(write.add, parts))


def _cut(write: AtenCalls, value: Any, axis: int, start: int, end: int) -> Any:
    if (start, end) == (0, value.meta["val"].shape[axis]):
        return value
    return write.call(_SLICE, value, axis, start, end)


def _tiles(height: int, width: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Rows and columns of parts of a window, of ``MOST_TAPS`` taps at most.

    >>> list(_tiles(7, 7))
    [((0, 3), (0, 7)), ((3, 6), (0, 7)), ((6, 7), (0, 7))]
    """
    columns = min(width, MOST_TAPS)
    rows = MOST_TAPS // columns
    for top in range(0, height, rows):
        for left in range(0, width, columns):
            yield (top, min(top + rows, height)), (left, min(left + columns, width))
