from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from backquant.lower.kernels.pooling import is_separable, max_pool2d, separable_max_pool


@pytest.mark.parametrize("shape", [(2, 24, 9, 7), (1, 3, 8, 8), (1, 40, 3, 3), (1, 1, 1, 1)])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [([3, 3], [2, 2], [1, 1]), ([3, 2], [1, 3], [0, 1]), ([1, 3], [2, 1], [0, 1])],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("ceil", [False, True])
def test_it_selects_what_pooling_selects(
    shape, kernel, stride, padding, layout, dtype, ceil
) -> None:
    x = torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)
    x = x.contiguous(memory_format=layout)
    if any(n + 2 * p < k for n, p, k in zip(shape[2:], padding, kernel, strict=True)):
        assert not is_separable(x, kernel, padding)
        return
    wanted = F.max_pool2d(x.float(), kernel, stride, padding, ceil_mode=ceil).to(dtype)
    assert torch.equal(separable_max_pool(x, kernel, stride, padding, ceil), wanted)
    assert torch.equal(max_pool2d(x, kernel, stride, padding, [1, 1], ceil), wanted)


def test_other_windows_are_left_to_the_quantized_kernel() -> None:
    x = torch.randint(0, 256, (1, 24, 9, 9), dtype=torch.uint8)
    for kernel, dilation, ceil in (([5, 5], 1, False), ([3, 3], 2, False), ([5, 5], 1, True)):
        found = max_pool2d(x, kernel, [2, 2], [0, 0], [dilation] * 2, ceil)
        wanted = F.max_pool2d(x.float(), kernel, 2, 0, dilation, ceil).byte()
        assert torch.equal(found, wanted)
