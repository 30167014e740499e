"""Between plain integer tensors and torch's quantized tensors, which the ``quantized::`` kernels take.

A view shares the memory, sizes and strides (so channels-last stays channels-last). torch warns once
per process that quantized tensors are deprecated; the first one is made here, at import, so that
users of a lowered model do not see it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from backquant.dtypes import plain_dtype, tensor_token

_set = torch.ops.aten.set_.source_Tensor_storage_offset

_CHANNELS_LAST = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}

# Tensors with fewer elements are copied: that is faster than making a view.
_COPY_BELOW = 1 << 17


def as_quantized(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """``x`` (uint8 or int8) as a quantized tensor that is only read: a copy of a small tensor, a
    view of a large one. Its strides are those of ``laid_out``.

    >>> as_quantized(torch.tensor([10, 12], dtype=torch.uint8), 0.5, 10).dequantize()
    tensor([0., 1.])
    """
    if x.numel() < _COPY_BELOW:
        return torch._make_per_tensor_quantized_tensor(x, scale, zero_point)
    return quantized_view(laid_out(x), scale, zero_point)


def as_quantized_image(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """``as_quantized`` for kernels that read ``[batch, channels, ...]`` by its memory format.

    >>> pixel = torch.zeros(1, 8, 1, 1, dtype=torch.uint8)
    >>> as_quantized(pixel, 0.5, 0).stride(), as_quantized_image(pixel, 0.5, 0).stride()
    ((8, 1, 1, 1), (8, 1, 8, 8))
    """
    return as_quantized(laid_out(x), scale, zero_point)


def laid_out(x: torch.Tensor) -> torch.Tensor:
    """``x`` with the strides of a new tensor, contiguous or channels last: a view, or a copy where there
    are holes between the elements. What could be either is channels last.

    Dimensions of size 1 may have any stride, so that a tensor may be channels last by one of torch's tests
    and contiguous by another; its quantized kernels ask both, and mix up the values.

    >>> pixels = torch.zeros(1, 6, 8, dtype=torch.uint8).transpose(1, 2).reshape(1, 8, 2, 3)
    >>> pixels.stride(), laid_out(pixels).stride()
    ((8, 1, 24, 8), (48, 1, 24, 8))
    """
    order = _CHANNELS_LAST.get(x.dim())
    if order is None:
        return _restrided(x.contiguous(), range(x.dim()))
    memory_format = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    if x.is_contiguous(memory_format=memory_format):
        return _restrided(x, order)
    if x.stride(1) == 1 and not x.is_contiguous():
        return _restrided(x.contiguous(memory_format=memory_format), order)
    dense = x.contiguous()
    is_either = dense.is_contiguous(memory_format=memory_format)
    return _restrided(dense, order if is_either else range(x.dim()))


def _restrided(x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """``x``, which lies without holes with its dimensions in this order, with the strides of that."""
    strides, step = [0] * x.dim(), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= x.shape[dim]
    return x if x.stride() == tuple(strides) else x.as_strided(x.shape, strides)


def quantized_view(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """``x`` (uint8, int8 or int32, any strides) as a quantized tensor; the memory is shared.

    >>> x = torch.tensor([10, 12], dtype=torch.uint8)
    >>> q = quantized_view(x, 0.5, 10)
    >>> q.dequantize(), q.data_ptr() == x.data_ptr()
    (tensor([0., 1.]), True)
    """
    view = torch._empty_affine_quantized(
        (0,), scale=scale, zero_point=zero_point, dtype=tensor_token(x.dtype)
    )
    return _with_memory_of(view, x)


def quantized_weight(
    weight: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None
) -> torch.Tensor:
    """The int8 ``weight`` as a quantized tensor that is only read, with one scale or one for each row;
    without zero points they are 0. The memory is shared: torch's packed weights keep the tensor that they
    were made from.

    >>> weight = torch.tensor([[2], [4]], dtype=torch.int8)
    >>> q = quantized_weight(weight, torch.tensor([0.5, 1.0]))
    >>> q.dequantize().flatten(), q.data_ptr() == weight.data_ptr()
    (tensor([1., 4.]), True)
    """
    weight = laid_out(weight)
    if scale.numel() == 1:
        return quantized_view(weight, float(scale), 0 if zero_point is None else int(zero_point))
    zeros = torch.zeros(scale.numel(), dtype=torch.int64) if zero_point is None else zero_point
    view = torch._empty_per_channel_affine_quantized(
        (0,), scales=scale, zero_points=zeros, axis=0, dtype=tensor_token(weight.dtype)
    )
    return _with_memory_of(view, weight)


def integer_view(q: torch.Tensor) -> torch.Tensor:
    """The integers of a quantized tensor; the memory is shared.

    >>> integer_view(quantized_view(torch.tensor([7], dtype=torch.int8), 0.5, 0))
    tensor([7], dtype=torch.int8)
    """
    return _with_memory_of(torch.empty(0, dtype=plain_dtype(q.dtype)), q)


def _with_memory_of(view: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``view``, of another dtype of the same width, made to show the memory of ``source``."""
    end = 1 + sum((n - 1) * step for n, step in zip(source.shape, source.stride(), strict=True))
    flat = source.as_strided((end if source.numel() else 0,), (1,))
    return shown_as(view, flat, source.size(), source.stride())


def shown_as(
    view: torch.Tensor, flat: torch.Tensor, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """``view`` itself, made to show the memory of ``flat`` from its beginning, in its own dtype.

    >>> bytes_ = torch.tensor([1 + 256 * 2], dtype=torch.int16)
    >>> shown_as(torch.empty(0, dtype=torch.uint8), bytes_, (2,), (1,))
    tensor([1, 2], dtype=torch.uint8)
    """
    shown: torch.Tensor = _set(view, flat, 0, size, stride)
    return shown


def _spend_the_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._empty_affine_quantized((0,), scale=1.0, zero_point=0, dtype=torch.quint8)


_spend_the_warning()
