"""Convolutions along a column of one pixel are computed along a line, as of torchcrepe's first layer."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from backquant.lower.kernels.conv import ConvConfig, OnednnConv
from backquant.lower.kernels.packed import WeightTensors

# weight, stride, padding, dilation, groups, rows of the image
CASES = [
    ((8, 1, 96, 1), 4, 0, 1, 1, 200),
    ((8, 2, 70, 1), 1, 5, 1, 1, 90),
    ((6, 3, 33, 1), 3, 7, 2, 1, 100),
    ((8, 2, 80, 1), 2, 3, 1, 4, 128),
    ((8, 1, 96, 1), 4, 0, 1, 1, 96),
]


def kernel_of(case: tuple[tuple[int, ...], int, int, int, int, int], zero_point: int) -> OnednnConv:
    shape, stride, padding, dilation, groups, _ = case
    config = ConvConfig(
        *((stride, 1), (padding, 0), (dilation, 1), groups),
        *(0.5, zero_point, 8.0, 64, torch.uint8, "relu"),
    )
    weight = torch.randint(-9, 10, shape, dtype=torch.int8)
    zeros = torch.zeros(shape[0], dtype=torch.int64)
    return OnednnConv(config, WeightTensors(weight, torch.full((shape[0],), 0.25), zeros, None))


def wanted(kernel: OnednnConv, x: torch.Tensor) -> torch.Tensor:
    c = kernel.config
    value = (x.double() - c.x_zero_point) * c.x_scale
    made = F.conv2d(
        value, kernel.weight.double() * 0.25, None, c.stride, c.padding, c.dilation, c.groups
    )
    return ((made.relu() / c.out_scale).round() + c.out_zero_point).clamp(0, 255)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("zero_point", [0, 37])
@pytest.mark.parametrize("columns", [1, 3])
def test_columns(
    case: tuple[tuple[int, ...], int, int, int, int, int], zero_point: int, columns: int
) -> None:
    torch.manual_seed(0)
    kernel = kernel_of(case, zero_point)
    x = torch.randint(0, 256, (2, case[0][1] * case[4], case[5], columns), dtype=torch.uint8)
    found = kernel(x)
    far = (found.double() - wanted(kernel, x)).abs()
    assert found.shape == wanted(kernel, x).shape and float(far.max()) <= 1
    assert float((far > 0).double().mean()) < 0.02
    laid = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(kernel(laid), found)


def test_a_column_lies_only_where_it_is_one() -> None:
    kernel = kernel_of(CASES[0], 0)
    assert kernel._lying(torch.zeros(1, 1, 200, 1)) is not None
    assert kernel._lying(torch.zeros(1, 1, 200, 2)) is None
    lying = kernel._lying(torch.zeros(1, 1, 200, 1))
    assert lying is not None and tuple(lying.weight.shape) == (8, 1, 1, 96)
    assert lying.config.stride == (1, 4) and lying._lying(torch.zeros(1, 1, 1, 200)) is None
    assert lying is kernel._lying(torch.zeros(2, 1, 300, 1))
