"""Shapes that oneDNN computes wrongly on AMX are found before their first use, and run as products."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant
from backquant.lower.kernels import onednn_conv, self_check
from backquant.lower.kernels.conv import ConvConfig, OnednnConv
from backquant.lower.kernels.conv_add import ConvAddConfig, OnednnConvAdd
from backquant.lower.kernels.geometry import Geometry
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.kernels.self_check import is_right_here

HAS_AMX = bool(torch.cpu.get_capabilities().get("amx_int8"))


def weights(*shape: int) -> WeightTensors:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
    scale = torch.rand(shape[0], generator=generator) * 0.01 + 0.001
    bias = torch.randn(shape[0], generator=generator)
    return WeightTensors(weight, scale, torch.zeros(shape[0], dtype=torch.int64), bias)


def integers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def expected(x: torch.Tensor, tensors: WeightTensors, config: ConvConfig) -> torch.Tensor:
    columns = (-1, *[1] * (x.dim() - 1))
    weight = tensors.weight.double() * tensors.scale.double().reshape(columns)
    value = (x.double() - config.x_zero_point) * config.x_scale
    function = (F.conv1d, F.conv2d, F.conv3d)[x.dim() - 3]
    bias = None if tensors.bias is None else tensors.bias.double()
    return function(
        value, weight, bias, config.stride, config.padding, config.dilation, config.groups
    )


def config(
    stride: tuple[int, ...], groups: int = 1, padding: int = 0, dilation: int = 1
) -> ConvConfig:
    dims = len(stride)
    rest = (0.02, 131, 1.0, 0, torch.float32)
    return ConvConfig(stride, (padding,) * dims, (dilation,) * dims, groups, *rest)


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "size"),
    [
        (32, (4, 4), (4, 4), (12, 12)),
        (32, (4, 4), (4, 4), (4, 4)),
        (16, (8, 8), (8, 8), (24, 24)),
        (8, (16, 16), (1, 1), (18, 18)),
        (16, (8, 8), (4, 1), (16, 16)),
        (48, (2, 4), (4, 4), (10, 12)),
    ],
)
def test_every_shape_is_right(
    channels: int, kernel: tuple[int, ...], stride: tuple[int, ...], size: tuple[int, ...]
) -> None:
    x, tensors = integers(2, channels, *size), weights(16, channels, *kernel)
    found = OnednnConv(config(stride), tensors)(x)
    torch.testing.assert_close(
        found.double(), expected(x, tensors, config(stride)), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("size", [(9,), (9, 8)])
def test_groups_of_one_channel_with_a_zero_point(size: tuple[int, ...]) -> None:
    """oneDNN (3.12) makes up for the zero point of the first group alone where each gives 33 channels."""
    x, tensors = integers(2, 3, *size), weights(99, 1, *[3] * len(size))
    asked = config((1,) * len(size), groups=3, padding=1)
    found = OnednnConv(asked, tensors)(x)
    torch.testing.assert_close(found.double(), expected(x, tensors, asked), rtol=1e-4, atol=1e-3)


def test_torch_is_wrong_on_amx() -> None:
    """When it fails on a CPU with AMX, torch has mended it, and the check can go. Some of AMD's without AMX
    have the defect, too."""
    geometry = Geometry((4, 4), (4, 4), (0, 0), (1, 1))
    is_right = self_check._tried((1, 32, 4, 4), (32, 32, 4, 4), geometry, 1)
    assert not (is_right and HAS_AMX)
    assert is_right_here((1, 32, 4, 4), (32, 32, 4, 4), geometry, 1) == is_right
    assert is_right_here((1, 32, 8, 8), (32, 32, 3, 3), Geometry((3, 3), (1, 1), (0, 0), (1, 1)), 1)


@pytest.mark.parametrize("batch", [1, 32])
def test_usual_shapes_are_right_on_every_cpu(batch: int) -> None:
    """Also where sums of two products saturate: layers get 7 bits there, and are tried with 7."""
    for channels, kernel in ((3, 3), (64, 3), (16, 1), (3, 7)):
        geometry = Geometry((kernel,) * 2, (1, 1), (kernel // 2,) * 2, (1, 1))
        shapes = (batch, channels, 16, 16), (32, channels, kernel, kernel)
        assert is_right_here(*shapes, geometry, 1)


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("stride", [(2,), (1, 2), (2, 1, 1)])
def test_products_of_patches_are_the_convolution(
    stride: tuple[int, ...], groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn_conv, "is_right_here", lambda *_: False)
    dims = len(stride)
    x, tensors = integers(2, 8, *range(7, 7 + dims)), weights(16, 8 // groups, *[3] * dims)
    asked = config(stride, groups, padding=1, dilation=2)
    found = OnednnConv(asked, tensors)(x)
    torch.testing.assert_close(found.double(), expected(x, tensors, asked), rtol=1e-4, atol=1e-3)


def test_products_of_patches_are_added_to(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = ((2, 2), (1, 1), (1, 1), 1, 0.02, 131, 0.5, 100, 0.3, 7)
    kernel = OnednnConvAdd(ConvAddConfig(*numbers), weights(8, 4, 3, 3))
    x, other = integers(2, 4, 9, 9) // 2, integers(2, 8, 5, 5)  # 7 bits, which no CPU saturates
    before = kernel(x, other)
    monkeypatch.setattr(onednn_conv, "is_right_here", lambda *_: False)
    assert torch.equal(kernel(x, other), before)


def test_a_trial_is_no_part_of_a_recording() -> None:
    model = nn.Sequential(nn.Conv2d(32, 32, 4, stride=4), nn.ReLU()).eval()
    x = torch.randn(1, 32, 12, 12)
    quantized = backquant.quantize(model, x, calibration=[x])
    first = quantized(x)
    assert quantized.replays is not None
    assert all(torch.equal(quantized(x), first) for _ in range(3))
    assert quantized.replays.programs == 1
    noise = (model(x) - first).detach()
    assert 10 * torch.log10(model(x).detach().pow(2).sum() / noise.pow(2).sum()) > 30


def test_what_never_ends_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN writes code without end for 16 channels and 14 taps along a line (EEGNet)."""
    tried: list[object] = []
    monkeypatch.setattr(self_check, "_is_right", lambda *case: tried.append(case) or True)
    line = Geometry((1, 16), (1, 1), (0, 8), (1, 1))
    assert not is_right_here((2, 16, 1, 250), (16, 1, 1, 16), line, 16, 131)
    assert not tried
    assert is_right_here((2, 16, 1, 250), (16, 1, 1, 16), line, 16, 0)
    assert is_right_here((2, 16, 1, 250), (16, 1, 1, 13), line, 16, 131)
    assert is_right_here((2, 32, 1, 250), (32, 1, 1, 16), line, 32, 131)
    assert len(tried) == 3


@pytest.mark.parametrize("shape", [(2, 16, 1, 60), (2, 16, 60)])
def test_long_lines_of_sixteen_channels(shape: tuple[int, ...]) -> None:
    dims = len(shape) - 2
    tensors = weights(16, 1, *(1,) * (dims - 1), 16)
    case = config((1,) * dims, groups=16)
    x = integers(*shape)
    torch.testing.assert_close(
        OnednnConv(case, tensors)(x).double(), expected(x, tensors, case), rtol=1e-4, atol=1e-3
    )
