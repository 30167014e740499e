from __future__ import annotations

import pytest
import torch

from backquant.lower.kernels.shuffle import shuffle


@pytest.mark.parametrize(
    ("shape", "first", "last"),
    [
        ((2, 6, 3, 4), (2, 2, 3, 3, 4), (2, 6, 3, 4)),
        ((1, 58, 5, 5), (1, 2, -1, 5, 5), (1, -1, 5, 5)),
        ((2, 6, 3, 4), (2, 3, 2, 3, 4), (2, 6, 3, 4)),  # three groups
        ((2, 6, 3, 4), (2, 2, 3, 4, 3), (2, 6, 3, 4)),  # not the channels
        ((2, 6, 3, 4), (2, 2, 3, 3, 4), (2, 6, 4, 3)),
        ((0, 6, 3, 4), (0, 2, 3, 3, 4), (0, 6, 3, 4)),
    ],
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_it_is_what_the_reshapes_do(
    shape: tuple[int, ...],
    first: tuple[int, ...],
    last: tuple[int, ...],
    layout: torch.memory_format,
    dtype: torch.dtype,
) -> None:
    x = torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)
    x = x.contiguous(memory_format=layout)
    before = x.clone()
    assert torch.equal(shuffle(x, first, last), x.reshape(first).transpose(1, 2).reshape(last))
    assert torch.equal(x, before)


def test_it_stays_channels_last() -> None:
    x = torch.ones(1, 4, 3, 3, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    found = shuffle(x, (1, 2, 2, 3, 3), (1, 4, 3, 3))
    assert found.is_contiguous(memory_format=torch.channels_last)
