"""Pooling on plain integer tensors: the result keeps the qparams of the input.

Max pooling selects values and is exact; average pooling sums integers and rounds once. Sequences are
images of height 1: torch's kernels for them mix up channels and places where the length is 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from backquant.errors import InputError
from backquant.lower.kernels.images import averaged, maxima
from backquant.lower.kernels.views import as_quantized_image, integer_view

_max_pool2d = torch.ops.quantized.max_pool2d.default
_max_pool3d = torch.ops.aten.quantized_max_pool3d.default


def max_pool1d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> torch.Tensor:
    """``x`` ``[batch, channels, length]``; each list has one entry.

    >>> max_pool1d(torch.tensor([[[1, 5, 2, 3]]], dtype=torch.uint8), [2], [2], [0], [1], False)
    tensor([[[5, 3]]], dtype=torch.uint8)
    """
    sizes = ((1, *kernel_size), (1, *stride), (0, *padding), (1, *dilation))
    return max_pool2d(x.unsqueeze(-2), *sizes, ceil_mode).squeeze(-2)


def max_pool2d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> torch.Tensor:
    """``x`` ``[batch, channels, height, width]``; each list has two entries.

    >>> x = torch.tensor([[[[1, 5], [2, 3]]]], dtype=torch.uint8)
    >>> max_pool2d(x, [2, 2], [2, 2], [0, 0], [1, 1], False).item()
    5
    """
    if list(dilation) == [1, 1] and has_windows(x, kernel_size, padding):
        found = maxima(x, (kernel_size, stride, padding), ceil_mode)
        if found is not None:
            return found
        if is_separable(x, kernel_size, padding):
            return separable_max_pool(x, kernel_size, stride, padding, ceil_mode)
    q = as_quantized_image(x, 1.0, 0)
    return integer_view(_max_pool2d(q, kernel_size, stride, padding, dilation, ceil_mode))


def max_pool3d(
    x: torch.Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> torch.Tensor:
    """``x`` ``[batch, channels, depth, height, width]``; each list has three entries.

    >>> x = torch.tensor([[[[[1, 5], [2, 3]]]]], dtype=torch.uint8)
    >>> max_pool3d(x, [1, 2, 2], [1, 2, 2], [0, 0, 0], [1, 1, 1], False).item()
    5
    """
    if x.dim() == 4:  # without a batch
        return max_pool3d(
            x.unsqueeze(0), kernel_size, stride, padding, dilation, ceil_mode
        ).squeeze(0)
    q = as_quantized_image(x, 1.0, 0)
    return integer_view(_max_pool3d(q, kernel_size, stride, padding, dilation, ceil_mode))


def avg_pool1d(
    x: torch.Tensor,
    scale: float,
    zero_point: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
) -> torch.Tensor:
    """``x`` ``[batch, channels, length]``; each list has one entry.

    >>> x = torch.tensor([[[1, 5, 2, 4]]], dtype=torch.uint8)
    >>> avg_pool1d(x, 1.0, 0, [2], [2], [0], False, True)
    tensor([[[3, 3]]], dtype=torch.uint8)
    """
    sizes = ((1, *kernel_size), (1, *stride), (0, *padding))
    rows = x.unsqueeze(-2)
    return avg_pool2d(rows, scale, zero_point, *sizes, ceil_mode, count_include_pad, None).squeeze(
        -2
    )


def avg_pool2d(
    x: torch.Tensor,
    scale: float,
    zero_point: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    """``x`` ``[batch, channels, height, width]``; each list has two entries.

    >>> x = torch.tensor([[[[1, 5], [2, 4]]]], dtype=torch.uint8)
    >>> avg_pool2d(x, 1.0, 0, [2, 2], [2, 2], [0, 0], False, True, None).item()
    3
    """
    if x.dim() not in (3, 4):
        raise InputError(
            "avg_pool2d takes images: [batch, channels, height, width], or one without a batch",
            where=f"{list(x.shape)}",
            fix="inputs of the shape that the float model takes",
        )
    _check_not_empty(x, 2)
    q = as_quantized_image(x, scale, zero_point)
    sizes = (tuple(kernel_size), tuple(stride), tuple(padding))
    return integer_view(F.avg_pool2d(q, *sizes, ceil_mode, count_include_pad, divisor_override))


def avg_pool3d(
    x: torch.Tensor,
    scale: float,
    zero_point: int,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    """``x`` ``[batch, channels, depth, height, width]``; each list has three entries.

    >>> x = torch.tensor([[[[[1, 5], [2, 4]]]]], dtype=torch.uint8)
    >>> avg_pool3d(x, 1.0, 0, [1, 2, 2], [1, 2, 2], [0, 0, 0], False, True, None).item()
    3
    """
    _check_not_empty(x, 3)
    q = as_quantized_image(x if x.dim() == 5 else x.unsqueeze(0), scale, zero_point)
    sizes = (tuple(kernel_size), tuple(stride), tuple(padding))
    pooled = F.avg_pool3d(q, *sizes, ceil_mode, count_include_pad, divisor_override)
    found = integer_view(pooled)
    return found if x.dim() == 5 else found.squeeze(0)


def adaptive_avg_pool1d(
    x: torch.Tensor, scale: float, zero_point: int, output_size: Sequence[int]
) -> torch.Tensor:
    """``x`` ``[batch, channels, length]`` to the length ``output_size``.

    >>> x = torch.tensor([[[1, 5, 2, 4]]], dtype=torch.uint8)
    >>> adaptive_avg_pool1d(x, 1.0, 0, [1]).item()
    3
    """
    return adaptive_avg_pool2d(x.unsqueeze(-2), scale, zero_point, (1, *output_size)).squeeze(-2)


def adaptive_avg_pool2d(
    x: torch.Tensor, scale: float, zero_point: int, output_size: Sequence[int | None]
) -> torch.Tensor:
    """``x`` ``[batch, channels, height, width]`` to the spatial size ``output_size``.

    >>> x = torch.tensor([[[[1, 5], [2, 4]]]], dtype=torch.uint8)
    >>> adaptive_avg_pool2d(x, 1.0, 0, [1, 1]).item()
    3
    """
    if tuple(output_size) == (1, 1) and (found := averaged(x)) is not None:
        return found
    q = as_quantized_image(x, scale, zero_point)
    return integer_view(F.adaptive_avg_pool2d(q, list(output_size)))  # type: ignore[arg-type]


def adaptive_avg_pool3d(
    x: torch.Tensor, scale: float, zero_point: int, output_size: Sequence[int | None]
) -> torch.Tensor:
    """``x`` ``[batch, channels, depth, height, width]`` to the spatial size ``output_size``.

    >>> x = torch.tensor([[[[[1, 5], [2, 4]]]]], dtype=torch.uint8)
    >>> adaptive_avg_pool3d(x, 1.0, 0, [1, 1, 1]).item()
    3
    """
    q = as_quantized_image(x if x.dim() == 5 else x.unsqueeze(0), scale, zero_point)
    found = integer_view(F.adaptive_avg_pool3d(q, list(output_size)))  # type: ignore[arg-type]
    return found if x.dim() == 5 else found.squeeze(0)


def _check_not_empty(x: torch.Tensor, dimensions: int) -> None:
    """Raise ``InputError`` for an empty image: torch's float kernels refuse it, its integer ones return
    padding."""
    if not all(x.shape[-dimensions:]):
        raise InputError(
            "the average of no value is not a number, and has no integer",
            where=f"{list(x.shape)}",
            fix="inputs whose last dimensions have one value at least",
        )


def _mean_of_nothing(x: torch.Tensor, dim: Sequence[int], keepdim: bool) -> torch.Tensor:
    """The mean of a tensor without values: empty, or an error where a result would be the mean of
    nothing.
    """
    shape = torch.empty(x.shape, device="meta").sum(tuple(dim), keepdim).shape
    if shape.numel():
        raise InputError(
            "the mean of no value is not a number, and has no integer",
            where=f"{list(x.shape)}, over {list(dim)}",
            fix="inputs with one value at least along the dimensions of the mean",
        )
    return x.new_empty(shape)


def mean(
    x: torch.Tensor, scale: float, zero_point: int, dim: Sequence[int], keepdim: bool
) -> torch.Tensor:
    """The mean over the dimensions ``dim``.

    >>> mean(torch.tensor([[1, 5], [2, 4]], dtype=torch.uint8), 1.0, 0, [1], False)
    tensor([3, 3], dtype=torch.uint8)
    """
    if not x.numel():
        return _mean_of_nothing(x, dim, keepdim)
    over_image = x.dim() == 4 and sorted(n % 4 for n in dim) == [2, 3]
    if over_image and (found := averaged(x)) is not None:
        return found if keepdim else found.flatten(1)
    # Where dimensions of size 1 have strides that look like channels last, torch asks for that memory format
    # for the result, and fails if it has fewer dimensions: so keepdim, and squeeze afterwards.
    pooled = integer_view(torch.mean(as_quantized_image(x, scale, zero_point), list(dim), True))
    return pooled if keepdim else pooled.squeeze(tuple(dim))


# Max pooling over rows, then over columns, by ``aten::maximum``: for few channels.
#
# ``quantized::max_pool2d`` takes 32 channels at a time and what is left of them one by one, 14 times as
# slowly (24 channels of 112×112: 0.52 ms, all of it for that rest); here every byte costs the same.

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
