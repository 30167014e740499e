"""Small and large products on the engine that is fastest for them: the integers are oneDNN's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from backquant.lower.kernels.conv import ConvConfig, OnednnConv
from backquant.lower.kernels.linear import LinearConfig, OnednnLinear
from backquant.lower.kernels.packed import WeightTensors

SHAPES = [((1, 32), 32), ((2, 5, 128), 64), ((64, 64), 64), ((320, 32), 40), ((3, 100, 64), 33)]


def weights(*shape: int) -> WeightTensors:
    out = shape[0]
    return WeightTensors(
        torch.randint(-127, 128, shape, dtype=torch.int8),
        torch.rand(out) * 0.01 + 0.01,
        torch.zeros(out, dtype=torch.int64),
        torch.randn(out),
    )


def integers(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("post_op", ["none", "relu"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(("shape", "out"), SHAPES, ids=str)
def test_linear_layers_are_onednn_s(
    shape: tuple[int, ...], out: int, dtype: torch.dtype, post_op: str
) -> None:
    scale, zero_point = (shape[-1] ** 0.5 * 0.02, 100) if dtype == torch.uint8 else (1.0, 0)
    config = LinearConfig(0.1, 113, scale, zero_point, dtype, post_op)
    kernel = OnednnLinear(config, weights(out, shape[-1]))
    x = integers(*shape)
    found = kernel(x)
    assert kernel._prepared or dtype == torch.float32
    weight, bias = kernel.packed_for(())
    own: Any = torch.ops.onednn.qlinear_pointwise.default(
        *(
            x,
            0.1,
            kernel._zero_points[1],
            weight,
            kernel.weight_scale,
            kernel.weight_zero_point,
            bias,
        ),
        *(scale, zero_point, dtype, post_op, [], ""),
    )
    assert found.shape == own.shape == (*shape[:-1], out)
    torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-3 if dtype == torch.float32 else 0)


def test_further_shapes_take_the_kernel_for_all() -> None:
    kernel = OnednnLinear(LinearConfig(0.1, 3, 0.1, 3, torch.uint8), weights(8, 16))
    for rows in range(100, 108):
        assert kernel(integers(rows, 16)).shape == (rows, 8)
    assert len(kernel._prepared) == 3


# batch, channels in and out, length, kernel, stride, padding, dilation, groups
LINES = [
    (1, 1, 32, 800, 80, 16, 0, 1, 1),
    (2, 32, 32, 125, 3, 1, 1, 1, 1),
    (3, 64, 64, 500, 1, 1, 0, 1, 1),
    (1, 16, 16, 500, 3, 1, 2, 2, 16),
    (2, 64, 64, 800, 8, 4, 3, 1, 1),
    (1, 20, 30, 77, 3, 1, 1, 1, 5),
    (1, 7, 9, 50, 5, 2, 2, 1, 1),
]


def layouts(batch: int, channels: int, length: int) -> dict[str, torch.Tensor]:
    last = integers(batch, length, channels).transpose(1, 2)
    part = integers(batch, channels + 3, length + 5)[:, 1 : channels + 1, 2 : length + 2]
    return {
        "contiguous": integers(batch, channels, length),
        "channels last": last,
        "part": part,
        "expanded": integers(batch, 1, length).expand(batch, channels, length),
    }


@pytest.mark.parametrize("post_op", ["none", "relu"])
@pytest.mark.parametrize("line", LINES, ids=str)
def test_convolutions_over_one_dimension_as_images_of_one_line(
    line: tuple[int, ...], post_op: str
) -> None:
    batch, channels, out, length, size, stride, padding, dilation, groups = line
    tensors = weights(out, channels // groups, size)
    scale = (channels // groups * size) ** 0.5 * 0.02
    config = ConvConfig(
        (stride,), (padding,), (dilation,), groups, 0.1, 113, scale, 70, torch.uint8, post_op
    )
    for name, x in layouts(batch, channels, length).items():
        kernel = OnednnConv(config, tensors)
        found = kernel(x)
        assert kernel._prepared, name
        weight = tensors.weight.double() * tensors.scale.double()[:, None, None]
        value = F.conv1d(
            (x.double() - 113) * 0.1,
            weight,
            None if tensors.bias is None else tensors.bias.double(),
            stride,
            padding,
            dilation,
            groups,
        )
        value = value.relu() if post_op == "relu" else value
        wanted = (torch.round(value / scale) + 70).clamp(0, 255)
        assert found.shape == wanted.shape
        assert (found.double() - wanted).abs().max() <= 1, name
