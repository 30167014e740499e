"""Interpolation of plain integer tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from backquant.lower.kernels.views import as_quantized_image, integer_view


def resize_bilinear(
    x: torch.Tensor,
    scale: float,
    zero_point: int,
    size: int | Sequence[int] | None,
    scale_factor: float | Sequence[float] | None,
    align_corners: bool | None,
    recompute_scale_factor: bool | None,
) -> torch.Tensor:
    """``x`` ``[batch, channels, height, width]`` to another height and width, with the same qparams.

    >>> x = torch.tensor([[[[0, 4]]]], dtype=torch.uint8)
    >>> resize_bilinear(x, 1.0, 0, (1, 3), None, True, None)
    tensor([[[[0, 2, 4]]]], dtype=torch.uint8)
    """
    resized = F.interpolate(
        as_quantized_image(x, scale, zero_point),
        size,
        scale_factor,
        "bilinear",
        align_corners,
        recompute_scale_factor,
    )
    return integer_view(resized)


def resize_nearest(
    x: torch.Tensor,
    size: int | Sequence[int] | None,
    scale_factor: float | Sequence[float] | None,
    mode: str,
    recompute_scale_factor: bool | None,
) -> torch.Tensor:
    """``x`` of int8 in another size. Bytes are selected as uint8, which torch's kernel knows.

    >>> resize_nearest(torch.tensor([[[-1, 4]]], dtype=torch.int8), 4, None, "nearest", None)
    tensor([[[-1, -1,  4,  4]]], dtype=torch.int8)
    """
    found = F.interpolate(
        x.view(torch.uint8), size, scale_factor, mode, None, recompute_scale_factor
    )
    return found.view(x.dtype)
