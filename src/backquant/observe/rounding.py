"""Rounding to quantized values in float, with gradients: what ``torch.fake_quantize_*`` compute.

``(clamp(round(x / scale) + zero_point, low, high) - zero_point) * scale``; gradients pass where
nothing was clamped (straight-through estimator).

On a CPU PyTorch's kernels round one number at a time, their backward multiplies by a mask of another
dtype, and its smallest and largest value per channel are found one by one, too. Here the same numbers
come from vectorised operators, on parts that stay in the cache: a third to a twentieth of the time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PART = 1 << 16  # numbers rounded at a time
_SMALL = 1 << 12  # tensors below are not worth it


def is_plain(x: Tensor) -> bool:
    """Whether ``x`` can be looked at and rounded in parts: float32 on a CPU, run and not traced.

    >>> is_plain(torch.zeros(100, 100)), is_plain(torch.zeros(2)), is_plain(torch.zeros(100, 100).half())
    (True, False, False)
    """
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.numel() >= _SMALL
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def channel_ends(x: Tensor, axis: int) -> Tensor:
    """Smallest and largest value of every channel along ``axis``, ``[channels, 2]``.

    >>> channel_ends(torch.tensor([[2.0, -1.0], [3.0, 4.0]]), 0)
    tensor([[-1.,  2.],
            [ 3.,  4.]])
    """
    others = [dim for dim in range(x.dim()) if dim != axis % x.dim()]
    if not others:
        return torch.stack((x, x), 1)
    return torch.stack((x.amin(others), x.amax(others)), 1)


def rounded(x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, bounds: Any) -> Tensor:
    """``x`` (any shape) rounded with ``scale`` and ``zero_point``: ``[1]``, or ``[channels]`` along
    ``axis``. ``bounds``: the least and the largest integer.

    >>> scale, zero_point = torch.tensor([0.5]), torch.tensor([1])
    >>> rounded(torch.tensor([-3.0, 0.3, 9.0]), scale, zero_point, None, (0, 15))
    tensor([-0.5000,  0.5000,  7.0000])
    """
    if is_plain(x) and not zero_point.is_floating_point() and scale.dtype == torch.float32:
        result: Tensor = _Rounded.apply(x, scale, zero_point, axis, bounds)
        return result
    if axis is None:
        return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, *bounds)
    return torch.fake_quantize_per_channel_affine(x, scale, zero_point, axis, *bounds)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, axis: int | None, bounds: Any
    ) -> Tensor:
        result = torch.empty_like(x)
        if result.stride() != x.stride():  # gaps, or one number in several places
            x = x.contiguous()
            result = torch.empty_like(x)
        inside = torch.empty_like(x, dtype=torch.bool)
        if axis is None:
            _round_whole((x, result, inside), scale, zero_point, bounds)
        else:
            _round_channels((x, result, inside), scale, zero_point, axis, bounds)
        ctx.save_for_backward(inside)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (inside,) = ctx.saved_tensors
        return torch.where(inside, grads[0], 0.0), None, None, None, None


def _round_whole(
    tensors: tuple[Tensor, Tensor, Tensor], scale: Tensor, zero_point: Tensor, bounds: Any
) -> None:
    step, zero = scale.reshape(()), int(zero_point)
    inverse = 1.0 / step
    low, high = bounds[0] - zero, bounds[1] - zero
    flat = [_as_line(tensor) for tensor in tensors]
    for start in range(0, len(flat[0]), _PART):
        x, result, inside = (tensor[start : start + _PART] for tensor in flat)
        nearest = torch.mul(x, inverse, out=result).round_()
        clamped = nearest.clamp(low, high)
        torch.eq(clamped, nearest, out=inside)
        torch.mul(clamped, step, out=result)


def _as_line(tensor: Tensor) -> Tensor:
    """The numbers of a tensor without gaps, in the order of memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _round_channels(
    tensors: tuple[Tensor, Tensor, Tensor],
    scale: Tensor,
    zero_point: Tensor,
    axis: int,
    bounds: Any,
) -> None:
    shape = [1] * tensors[0].dim()
    shape[axis] = -1
    steps, inverses = scale.view(shape), (1.0 / scale).view(shape)
    lows, highs = ((end - zero_point).to(torch.float32).view(shape) for end in bounds)
    rows = tensors[0].size(0)
    many = max(1, _PART * rows // tensors[0].numel())
    by_row = axis % tensors[0].dim() == 0
    for start in range(0, rows, many):
        part = slice(start, start + many)
        own = part if by_row else slice(None)
        x, result, inside = (tensor[part] for tensor in tensors)
        nearest = torch.mul(x, inverses[own], out=result).round_()
        clamped = nearest.clamp(lows[own], highs[own])
        torch.eq(clamped, nearest, out=inside)
        torch.mul(clamped, steps[own], out=result)
