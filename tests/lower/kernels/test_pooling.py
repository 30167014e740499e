"""Pooling on plain integer tensors."""

from __future__ import annotations

import pytest
import torch

from backquant.errors import InputError
from backquant.lower.kernels.pooling import avg_pool1d, avg_pool2d, avg_pool3d, mean


@pytest.mark.parametrize("keepdim", [True, False])
@pytest.mark.parametrize("strides", [(8, 1, 1, 1), (8, 1, 8, 8)])
def test_mean_of_one_pixel(strides: tuple[int, ...], keepdim: bool) -> None:
    """Both are strides of an image of one pixel, rows first and channels last."""
    x = torch.arange(16, dtype=torch.uint8).as_strided((2, 8, 1, 1), strides)
    result = mean(x, 0.1, 3, [-2, -1], keepdim)
    assert torch.equal(result, x if keepdim else x.reshape(2, 8))


def test_mean_of_no_value(snapshot) -> None:
    with pytest.raises(InputError) as caught:
        mean(torch.zeros(1, 4, 0, 6, dtype=torch.uint8), 0.1, 3, [3, 2], True)
    snapshot("mean-of-no-value", caught.value)


def test_images_of_one_dimension_more(snapshot) -> None:
    """PyTorch's kernel for integers takes them, and its float kernel does not."""
    x, window = torch.zeros(1, 2, 5, 5, 5, dtype=torch.uint8), ([3, 3], [2, 2], [1, 1])
    with pytest.raises(InputError) as caught:
        avg_pool2d(x, 0.1, 3, *window, False, True, None)
    snapshot("five-dimensions", caught.value)


def test_the_average_of_nothing_is_refused(snapshot) -> None:
    """As the float operators do; with padding torch's integer ones give zeros."""
    for shape in ((2, 3, 0), (2, 3, 4, 0), (2, 3, 4, 4, 0)):
        pool, x = (avg_pool1d, avg_pool2d, avg_pool3d)[len(shape) - 3], torch.zeros(shape)
        window = [[2] * (len(shape) - 2), [1] * (len(shape) - 2), [1] * (len(shape) - 2)]
        rest = (None,) if len(shape) > 3 else ()
        with pytest.raises(InputError) as caught:
            pool(x.to(torch.uint8), 1.0, 0, *window, False, True, *rest)
        snapshot(f"average-of-no-value-{len(shape) - 2}d", caught.value)
