"""Softmax and matrix products on plain integer tensors, by the ``quantized::`` kernels."""

from __future__ import annotations

import torch

from backquant.lower.kernels.views import as_quantized, integer_view


def softmax(
    x: torch.Tensor, scale: float, zero_point: int, dim: int, out_scale: float, out_zero_point: int
) -> torch.Tensor:
    """Integers of the softmax over ``dim``, in the dtype of ``x``.

    >>> x = torch.tensor([[3, 3]], dtype=torch.uint8)
    >>> softmax(x, 1.0, 0, -1, 1 / 256, 0)
    tensor([[128, 128]], dtype=torch.uint8)
    """
    q = as_quantized(x, scale, zero_point)
    axis = dim % x.dim()  # qnnpack takes no negative axis
    return integer_view(torch.ops.quantized.softmax.default(q, axis, out_scale, out_zero_point))


def matmul(
    x: torch.Tensor,
    x_scale: float,
    x_zero_point: int,
    y: torch.Tensor,
    y_scale: float,
    y_zero_point: int,
    out_scale: float,
    out_zero_point: int,
) -> torch.Tensor:
    """Integers of ``x @ y``; shapes as for ``torch.matmul``.

    >>> x = torch.tensor([[2, 4]], dtype=torch.uint8)
    >>> matmul(x, 0.5, 0, x.T.contiguous(), 0.5, 0, 1.0, 0)
    tensor([[5]], dtype=torch.uint8)
    """
    qx, qy = as_quantized(x, x_scale, x_zero_point), as_quantized(y, y_scale, y_zero_point)
    return integer_view(torch.ops.quantized.matmul.default(qx, qy, out_scale, out_zero_point))
