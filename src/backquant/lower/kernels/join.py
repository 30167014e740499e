"""Concatenation of integer tensors whose qparams differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backquant.lower.kernels.boundary import requantize


def cat(
    parts: Sequence[torch.Tensor],
    scales: Sequence[float],
    zero_points: Sequence[int],
    fits: Sequence[bool],
    dim: int,
    out_scale: float,
    out_zero_point: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``parts`` along ``dim``, those that do not have the result's qparams (``fits``) requantized.

    >>> x = torch.tensor([10, 14], dtype=torch.uint8)
    >>> cat([x, x], [0.5, 1.0], [10, 0], [False, True], 0, 1.0, 0, 0, 255, torch.uint8)
    tensor([ 0,  2, 10, 14], dtype=torch.uint8)
    """
    out = (out_scale, out_zero_point, quant_min, quant_max, dtype)
    return torch.cat(
        [
            x if fit else requantize(x, scale, zero_point, *out)
            for x, scale, zero_point, fit in zip(parts, scales, zero_points, fits, strict=True)
        ],
        dim,
    )
