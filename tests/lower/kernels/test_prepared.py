from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from backquant.lower.kernels.conv import ConvConfig, OnednnConv
from backquant.lower.kernels.linear import LinearConfig, OnednnLinear
from backquant.lower.kernels.packed import WeightTensors

SHAPES = [
    # in, out, kernel, stride, padding, groups
    (3, 16, 3, 2, 1, 1),
    (24, 24, 5, 1, 2, 24),
    (13, 7, 1, 1, 0, 1),
    (16, 6, 1, 2, 0, 1),
    (8, 12, 3, 1, 1, 4),
    (128, 128, 3, 1, 1, 1),  # padded beforehand
]


def kernel(
    shape: tuple[int, ...], zero_point: int, post_op: str, out_zero_point: int
) -> OnednnConv:
    torch.manual_seed(0)
    inputs, outputs, size, stride, padding, groups = shape
    weight = torch.randint(-127, 128, (outputs, inputs // groups, size, size), dtype=torch.int8)
    zeros = torch.zeros(outputs, dtype=torch.int64)
    tensors = WeightTensors(weight, torch.rand(outputs) / 100, zeros, torch.randn(outputs))
    numbers = (0.0, 0.8 * 255) if post_op == "hardtanh" else ()
    config = ConvConfig(
        (stride,) * 2, (padding,) * 2, (1, 1), groups, 0.05, zero_point, 0.8, out_zero_point,
        torch.uint8, post_op, numbers,
    )  # fmt: skip
    return OnednnConv(config, tensors)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("zero_point", "post_op", "out"), [(0, "relu", 0), (9, "none", 100)])
def test_it_gives_the_integers_of_the_kernel(
    shape: tuple[int, ...], zero_point: int, post_op: str, out: int
) -> None:
    made = kernel(shape, zero_point, post_op, out)
    other = kernel(shape, zero_point, post_op, out)
    other._prepared_name = ""  # every call describes its primitive anew
    # 14 and 13 give results of one size where the stride is 2
    for batch, size in ((1, 14), (2, 13), (1, 13), (3, 9)):
        x = torch.randint(0, 256, (batch, shape[0], size, size), dtype=torch.uint8)
        far = (made(x).int() - other(x).int()).abs()
        # a matrix product in place of a 1×1 convolution may break a tie otherwise
        assert far.max() <= (shape[2] == 1) and far.count_nonzero() <= far.numel() // 1000
    assert len(made._prepared) == 3  # so many packed weights are enough


@pytest.mark.parametrize(
    ("post_op", "zero_point", "name"),
    [("hardtanh", 0, "conv2d_relu"), ("hardtanh", 10, "conv2d_relu"), ("swish", 0, "")],
)
def test_a_clamp_at_the_end_of_the_range_is_a_relu(
    post_op: str, zero_point: int, name: str
) -> None:
    assert kernel(SHAPES[2], 0, post_op, zero_point)._prepared_name == name


@pytest.mark.parametrize("shape", SHAPES)
def test_an_empty_batch(shape: tuple[int, ...]) -> None:
    made = kernel(shape, 0, "relu", 0)
    one = made(torch.zeros(1, shape[0], 9, 9, dtype=torch.uint8))
    none = made(torch.zeros(0, shape[0], 9, 9, dtype=torch.uint8))
    assert none.shape == (0, *one.shape[1:]) and none.dtype == torch.uint8


@pytest.mark.parametrize("post_op", ["none", "relu"])
@pytest.mark.parametrize("rows", [(1,), (3,), (2, 4), (0,), (9,)])
def test_a_few_rows(rows: tuple[int, ...], post_op: str) -> None:
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (21, 37), dtype=torch.int8)
    zeros, scale = torch.zeros(21, dtype=torch.int64), torch.rand(21) / 100
    tensors = WeightTensors(weight, scale, zeros, torch.randn(21))
    config = LinearConfig(0.05, 20, 0.3, 100, torch.uint8, post_op)
    x = torch.randint(0, 256, (*rows, 37), dtype=torch.uint8)
    value = (x.double() - 20) * 0.05 @ (weight * scale[:, None].double()).T + tensors.bias.double()
    wanted = (value.relu() if post_op == "relu" else value) / 0.3 + 100
    found = OnednnLinear(config, tensors)(x)
    assert found.shape == wanted.shape
    assert not wanted.numel() or (found - wanted.clamp(0, 255)).abs().max() < 0.501


@pytest.mark.parametrize("batch", [1, 3, 20])
@pytest.mark.parametrize(
    ("post_op", "zero_point"), [("none", 100), ("relu", 0), ("swish", 3), ("hardswish", 5)]
)
def test_images_of_one_pixel(batch: int, post_op: str, zero_point: int) -> None:
    made = kernel(SHAPES[2], 9, post_op, zero_point)
    x = torch.randint(0, 256, (batch, 13, 1, 1)).byte()
    found = made(x)
    integers = x.flatten(1).double() - 9
    weight = made.weight.flatten(1).double() * made.weight_scale[:, None].double()
    value = integers * 0.05 @ weight.T + made.bias.double()
    functions = {"relu": F.relu, "swish": F.silu, "hardswish": F.hardswish}
    value = functions.get(post_op, lambda v: v)(value)
    wanted = (value / 0.8 + zero_point).clamp(0, 255)
    assert found.shape == (batch, 7, 1, 1) and found.dtype == torch.uint8
    assert (found.flatten(1) - wanted).abs().max() < 0.501


def test_one_object_of_fbgemm_serves_all_batches() -> None:
    made = kernel(SHAPES[2], 9, "none", 100)
    for batch in range(1, 8):
        made(torch.ones(batch, 13, 1, 1, dtype=torch.uint8))
    assert list(made._prepared) == [()]
