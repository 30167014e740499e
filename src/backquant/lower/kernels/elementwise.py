"""Binary elementwise kernels, by ``quantized::add``, ``add_relu``, ``mul`` and ``mul_relu``; products of
different shapes (a gate per channel) in float.

Shapes broadcast; both inputs and the result have one dtype, uint8 or int8. The arguments are those of
``quantized::add(qa, qb, scale, zero_point)`` with the qparams of the inputs beside them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from backquant.lower.kernels.boundary import quantize
from backquant.lower.kernels.images import gated
from backquant.lower.kernels.views import as_quantized, integer_view

_add = torch.ops.quantized.add.default
_add_relu = torch.ops.quantized.add_relu.default
_mul = torch.ops.quantized.mul.default
_mul_relu = torch.ops.quantized.mul_relu.default


def add(
    x: torch.Tensor,
    x_scale: float,
    x_zero_point: int,
    y: torch.Tensor,
    y_scale: float,
    y_zero_point: int,
    out_scale: float,
    out_zero_point: int,
) -> torch.Tensor:
    """Integers of the sum.

    >>> x = torch.tensor([4, 6], dtype=torch.uint8)
    >>> add(x, 0.5, 0, x, 0.5, 0, 1.0, 0)
    tensor([4, 6], dtype=torch.uint8)
    """
    qx, qy = as_quantized(x, x_scale, x_zero_point), as_quantized(y, y_scale, y_zero_point)
    if x.shape != y.shape:
        return _broadcast(_add, torch.add, (qx, qy), (out_scale, out_zero_point))
    return integer_view(_add(qx, qy, out_scale, out_zero_point))


def add_relu(
    x: torch.Tensor,
    x_scale: float,
    x_zero_point: int,
    y: torch.Tensor,
    y_scale: float,
    y_zero_point: int,
    out_scale: float,
    out_zero_point: int,
) -> torch.Tensor:
    """Integers of ``relu(x + y)``.

    >>> x = torch.tensor([4, 12], dtype=torch.uint8)
    >>> add_relu(x, 0.5, 10, x, 0.5, 10, 1.0, 3)
    tensor([3, 5], dtype=torch.uint8)
    """
    qx, qy = as_quantized(x, x_scale, x_zero_point), as_quantized(y, y_scale, y_zero_point)
    if x.shape != y.shape:
        return _broadcast(_add_relu, _sum_relu, (qx, qy), (out_scale, out_zero_point))
    return integer_view(_add_relu(qx, qy, out_scale, out_zero_point))


def mul(
    x: torch.Tensor,
    x_scale: float,
    x_zero_point: int,
    y: torch.Tensor,
    y_scale: float,
    y_zero_point: int,
    out_scale: float,
    out_zero_point: int,
) -> torch.Tensor:
    """Integers of the product.

    >>> x = torch.tensor([4, 6], dtype=torch.uint8)
    >>> mul(x, 0.5, 0, x, 0.5, 0, 1.0, 0)
    tensor([4, 9], dtype=torch.uint8)
    """
    of = (x, (x_scale, x_zero_point), y, (y_scale, y_zero_point), (out_scale, out_zero_point))
    if x.shape != y.shape and (found := gated(*of, 0)) is not None:
        return found
    qx, qy = as_quantized(x, x_scale, x_zero_point), as_quantized(y, y_scale, y_zero_point)
    if x.shape != y.shape:
        return quantize(_product(qx, qy), out_scale, out_zero_point, *_full(x.dtype))
    return integer_view(_mul(qx, qy, out_scale, out_zero_point))


def mul_relu(
    x: torch.Tensor,
    x_scale: float,
    x_zero_point: int,
    y: torch.Tensor,
    y_scale: float,
    y_zero_point: int,
    out_scale: float,
    out_zero_point: int,
) -> torch.Tensor:
    """Integers of ``relu(x * y)``.

    >>> x = torch.tensor([8, 12], dtype=torch.uint8)
    >>> mul_relu(x, 0.5, 10, torch.tensor([2, 2], dtype=torch.uint8), 1.0, 0, 1.0, 3)
    tensor([3, 5], dtype=torch.uint8)
    """
    of = (x, (x_scale, x_zero_point), y, (y_scale, y_zero_point), (out_scale, out_zero_point))
    if x.shape != y.shape and (found := gated(*of, out_zero_point)) is not None:
        return found
    qx, qy = as_quantized(x, x_scale, x_zero_point), as_quantized(y, y_scale, y_zero_point)
    if x.shape != y.shape:
        return quantize(_product(qx, qy).relu_(), out_scale, out_zero_point, *_full(x.dtype))
    return integer_view(_mul_relu(qx, qy, out_scale, out_zero_point))


def _broadcast(
    kernel: Callable[..., torch.Tensor],
    compute: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    pair: tuple[torch.Tensor, torch.Tensor],
    out: tuple[float, int],
) -> torch.Tensor:
    """``quantized::add`` gives its result the shape of its first argument, and resizes it with a warning:
    the larger one goes first; where neither has the shape of the sum, floats are added."""
    x, y = pair
    shape = torch.broadcast_shapes(x.shape, y.shape)
    if shape in (x.shape, y.shape):
        return integer_view(kernel(x, y, *out) if x.shape == shape else kernel(y, x, *out))
    value = compute(x.dequantize(), y.dequantize())
    dtype = torch.uint8 if x.dtype == torch.quint8 else torch.int8
    return quantize(value, out[0], out[1], *_full(dtype))


def _sum_relu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.relu_(x + y)


def _product(qx: torch.Tensor, qy: torch.Tensor) -> torch.Tensor:
    """The float product of two quantized tensors of different shapes: where one is repeated,
    ``quantized::mul`` takes up to nine times as long as the detour over floats."""
    x, y = qx.dequantize(), qy.dequantize()
    shape = torch.broadcast_shapes(x.shape, y.shape)
    if x.shape == shape:
        return x.mul_(y)
    return y.mul_(x) if y.shape == shape else x * y


def _full(dtype: torch.dtype) -> tuple[int, int, torch.dtype]:
    info = torch.iinfo(dtype)
    return info.min, info.max, dtype
