"""Pooling on plain integer tensors."""

from __future__ import annotations

import pytest
import torch

from backquant.lower.kernels.pooling import mean


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("strides", [(8, 1, 1, 1), (8, 1, 8, 8)])
def test_mean_of_one_pixel(strides: tuple[int, ...], keepdim: bool) -> None:
    """Both are strides of an image of one pixel, rows first and channels last."""
    x = torch.arange(16, dtype=torch.uint8).as_strided((2, 8, 1, 1), strides)
    result = mean(x, 0.1, 3, [-2, -1], keepdim)
    assert torch.equal(result, x if keepdim else x.reshape(2, 8))
