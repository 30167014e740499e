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
from backquant.lower.kernels.separable_pooling import has_windows, is_separable, separable_max_pool
from backquant.lower.kernels.views import as_quantized_image, integer_view

_max_pool2d = torch.ops.quantized.max_pool2d.default
_max_pool3d = torch.ops.aten.quantized_max_pool3d.default


# size: the arguments of quantized::max_pool1d.
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


# size: the arguments of quantized::max_pool2d.
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


# size: the arguments of aten::quantized_max_pool3d.
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


# size: the arguments of aten::avg_pool1d after the qparams of the input.
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


# size: the arguments of aten::avg_pool2d after the qparams of the input.
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
    pooled = F.avg_pool2d(
        q,
        tuple(kernel_size),
        tuple(stride),
        tuple(padding),
        ceil_mode,
        count_include_pad,
        divisor_override,
    )
    return integer_view(pooled)


# size: the arguments of aten::avg_pool3d after the qparams of the input.
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
    pooled = F.avg_pool3d(
        q,
        tuple(kernel_size),
        tuple(stride),
        tuple(padding),
        ceil_mode,
        count_include_pad,
        divisor_override,
    )
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
