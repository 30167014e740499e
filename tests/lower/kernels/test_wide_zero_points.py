"""One step of the products is thousands of steps of the result: the bias is not lost beside the zero point.

So it is behind one huge channel. Every value of the input is the zero point here, so that the result is the
bias.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backquant.lower.kernels.conv import ConvConfig, OnednnConv
from backquant.lower.kernels.conv_add import ConvAddConfig, OnednnConvAdd
from backquant.lower.kernels.linear import LinearConfig, OnednnLinear
from backquant.lower.kernels.packed import WeightTensors
from backquant.runtime.compiled.operators import convolution, linear

SOURCE = (15_529.7333984375, 127)
RESULT = (0.0182668324559927, 54, torch.uint8)
CASES = {  # weight, padding, groups
    "line": ((14, 1, 3), 0, 7),
    "image": ((16, 8, 3, 3), 0, 1),
    "padded": ((16, 8, 3, 3), 1, 1),
    "large": ((128, 128, 3, 3), 1, 1),
    "depthwise": ((8, 1, 3, 3), 1, 8),
    "points": ((16, 8, 1, 1), 0, 1),
    "volume": ((4, 4, 3, 3, 3), 1, 1),
}


def _tensors(shape: tuple[int, ...]) -> WeightTensors:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
    scale = torch.rand(shape[0], generator=generator) * 0.004 + 0.001
    bias = torch.rand(shape[0], generator=generator) - 0.5
    return WeightTensors(weight, scale, torch.zeros(shape[0], dtype=torch.int64), bias)


def _wanted(tensors: WeightTensors, other: float = 0.0) -> torch.Tensor:
    assert tensors.bias is not None
    return (torch.round((tensors.bias + other) / RESULT[0]) + RESULT[1]).clamp(0, 255)


def _is_wanted(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    columns = found.transpose(0, 1).flatten(1) if found.dim() > 2 else found.T
    return bool((columns.float() - wanted.unsqueeze(1)).abs().max() <= 1)


@pytest.mark.parametrize("case", CASES)
def test_a_convolution_keeps_its_bias(case: str) -> None:
    shape, padding, groups = CASES[case]
    tensors, dims = _tensors(shape), len(shape) - 2
    geometry: Any = ((1,) * dims, (padding,) * dims, (1,) * dims, groups)
    x = torch.full((1, shape[1] * groups) + (9,) * dims, SOURCE[1], dtype=torch.uint8)
    kernel = OnednnConv(ConvConfig(*geometry, *SOURCE, *RESULT), tensors)
    assert _is_wanted(kernel(x), _wanted(tensors))
    again = convolution(
        *(
            x,
            *SOURCE,
            tensors.weight,
            tensors.scale,
            tensors.bias,
            *map(list, geometry[:3]),
            groups,
            None,
            1.0,
            0,
        ),
        *(*RESULT, "none", [], ""),
    )
    assert _is_wanted(again, _wanted(tensors))


@pytest.mark.parametrize("rows", [1, 5, 300])
def test_a_linear_layer_keeps_its_bias(rows: int) -> None:
    tensors = _tensors((16, 64))
    x = torch.full((rows, 64), SOURCE[1], dtype=torch.uint8)
    assert _is_wanted(OnednnLinear(LinearConfig(*SOURCE, *RESULT), tensors)(x), _wanted(tensors))
    again = linear(x, *SOURCE, tensors.weight, tensors.scale, tensors.bias, *RESULT, "none", [], "")
    assert _is_wanted(again, _wanted(tensors))


@pytest.mark.parametrize("padding", [0, 1])
def test_a_sum_keeps_the_bias(padding: int) -> None:
    tensors = _tensors((8, 8, 3, 3))
    geometry: Any = ((1, 1), (padding, padding), (1, 1), 1)
    config = ConvAddConfig(*geometry, *SOURCE, 0.01, 100, *RESULT[:2])
    x = torch.full((1, 8, 9, 9), SOURCE[1], dtype=torch.uint8)
    other = torch.full((1, 8, 7 + 2 * padding, 7 + 2 * padding), 130, dtype=torch.uint8)
    assert _is_wanted(OnednnConvAdd(config, tensors)(x, other), _wanted(tensors, 0.3))
