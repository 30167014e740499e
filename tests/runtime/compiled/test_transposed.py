"""Transposed convolutions as they are compiled: the integers of the kernels whose place they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.kernels.quantized import QuantizedConfig, QuantizedWeighted
from backquant.runtime.compiled.modules import TransposedConvolution

#: kernel, stride, padding, dilation, output padding, groups
GEOMETRIES: list[tuple[Any, ...]] = [
    ((3,), (2,), (1,), (1,), (1,), 1),
    ((4,), (3,), (0,), (2,), (2,), 2),
    ((3, 3), (2, 1), (2, 1), (2, 1), (1, 0), 3),
    ((1, 4), (3, 3), (0, 1), (1, 1), (2, 2), 1),
    ((3, 2, 2), (2, 2, 1), (1, 0, 1), (1, 1, 2), (1, 1, 0), 1),
]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_integers_are_those_of_the_kernel(geometry: tuple[Any, ...]) -> None:
    kernel, stride, padding, dilation, output_padding, groups = geometry
    generator = torch.Generator().manual_seed(0)
    dims = len(kernel)
    config = QuantizedConfig(
        *(f"conv_transpose{dims}d", "fbgemm", 0.02, 77, 0.5, 100),
        *(stride, padding, dilation, output_padding, groups),
    )
    shape = (groups * 2, 5, *kernel)
    weight = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
    bias = torch.randn(groups * 5, generator=generator)
    tensors = WeightTensors(weight, torch.tensor([0.01]), torch.zeros(1, dtype=torch.int64), bias)
    x = torch.randint(0, 256, (2, groups * 2, *range(4, 4 + dims)), dtype=torch.uint8)
    lowered = QuantizedWeighted(config, tensors)
    assert torch.equal(TransposedConvolution(lowered)(x), lowered(x))
