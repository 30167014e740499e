"""Pooling on plain integer tensors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from backquant.errors import InputError
from backquant.lower.kernels import pooling
from backquant.lower.kernels.pooling import avg_pool1d, avg_pool2d, avg_pool3d, max_pool2d, mean


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


_WINDOWS = (  # of PyTorch's models, and odd ones: size, stride, padding, ceil mode
    ([3, 3], [2, 2], [1, 1], False),
    ([2, 2], [2, 2], [0, 0], True),
    ([5, 5], [1, 1], [2, 2], False),
    ([3, 2], [2, 3], [1, 0], True),
    ([1, 7], [1, 2], [0, 3], True),
    ([2, 2], [5, 5], [1, 1], True),
)


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("window", _WINDOWS)
@pytest.mark.parametrize("channels", [1, 3, 24, 64, 100])
def test_maxima_by_the_library(
    window: tuple[list[int], list[int], list[int], bool],
    channels: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In every layout those of PyTorch, whose kernel for integers is not called."""
    monkeypatch.setattr(pooling, "_max_pool2d", None)
    size, stride, padding, ceil_mode = window
    wide = torch.randint(0, 256, (2, channels + 3, 60, 43), dtype=torch.uint8)
    last = wide.contiguous(memory_format=torch.channels_last)
    try:
        torch.set_num_threads(threads)
        for x in (wide[:, 3:], last[:, :channels], last[:1, 2:-1, 1:, ::2], last[1:, :channels]):
            found = max_pool2d(x, size, stride, padding, [1, 1], ceil_mode)
            expected = F.max_pool2d(x.double(), size, stride, padding, 1, ceil_mode)
            assert torch.equal(found.double(), expected)
    finally:
        torch.set_num_threads(1)


@pytest.mark.usefixtures("native_library")
def test_windows_that_the_library_does_not_take() -> None:
    """With a dilation, also of what has no batch and of an empty one."""
    x = torch.randint(0, 256, (1, 8, 9, 9), dtype=torch.uint8)
    for image in (x, x[0], x[:0]):
        found = max_pool2d(image, [3, 3], [2, 2], [1, 1], [2, 2], False)
        assert torch.equal(found.float(), F.max_pool2d(image.float(), 3, 2, 1, 2))


BY_HAND = {
    "inputs of the shape": lambda *_: avg_pool2d(
        torch.zeros(1, 2, 5, 5, dtype=torch.uint8),
        0.1,
        3,
        [3, 3],
        [2, 2],
        [1, 1],
        False,
        True,
        None,
    ),
    "inputs with one value": lambda *_: mean(
        torch.zeros(1, 4, 1, 6, dtype=torch.uint8), 0.1, 3, [3, 2], True
    ),
    "inputs whose last": lambda _, n: n["pool"](
        torch.zeros(*n["shape"][:2], *(4 for _ in n["shape"][2:]), dtype=torch.uint8),
        *(1.0, 0, *n["window"], False, True, *n["rest"]),
    ),
}
