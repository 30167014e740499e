from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from backquant.lower.kernels.conv import ConvConfig, OnednnConv
from backquant.lower.kernels.linear import LinearConfig, OnednnLinear
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.kernels.zero_point import fold_zero_point, pad_with


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_folded_bias_makes_up_for_the_zero_point(per_channel, bias):
    weight = torch.randint(-127, 128, (5, 4, 3), dtype=torch.int8)
    scale = torch.rand(5 if per_channel else 1) * 0.01
    b = torch.randn(5) if bias else None
    x = torch.randint(0, 256, (2, 4, 9)).double()
    real = weight.double() * scale.double().reshape(-1, 1, 1)
    exact = F.conv1d((x - 77) * 0.02, real, None if b is None else b.double())
    folded = fold_zero_point(weight, scale, b, 0.02, 77)
    assert folded.dtype is torch.float32
    assert torch.allclose(F.conv1d(x * 0.02, real, folded.double()), exact, atol=1e-5)


def test_a_zero_point_of_zero_leaves_the_bias_as_it_is():
    bias = torch.randn(3)
    weight = torch.ones(3, 2, dtype=torch.int8)
    assert fold_zero_point(weight, torch.ones(3), bias, 0.1, 0) is bias
    assert fold_zero_point(weight, torch.ones(3), None, 0.1, 0) is None


@pytest.mark.parametrize("padding", [(2,), (1, 2), (0, 1), (1, 0, 2)])
def test_padding_stands_around_every_spatial_dimension(padding):
    x = torch.randint(0, 256, (2, 3, *[4] * len(padding)), dtype=torch.uint8)
    padded = pad_with(x, padding, 9)
    assert padded.shape[2:] == tuple(4 + 2 * p for p in padding)
    inside = padded
    for dim, size in enumerate(padding, start=2):
        inside = inside.narrow(dim, size, 4)
    assert torch.equal(inside, x)
    assert padded.sum() == x.sum() + 9 * (padded.numel() - x.numel())


def test_channels_last_is_kept():
    x = torch.ones(2, 3, 4, 5, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    assert pad_with(x, (1, 1), 0).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("groups", [1, 2, 16])
def test_long_sums_lose_nothing(padding, groups):
    """512 channels, the largest products, a zero point in the middle: sums far beyond 24 bits."""
    channels = 512
    x = torch.randint(0, 256, (1, channels, 5, 5), dtype=torch.uint8)
    weight = torch.randint(100, 128, (32, channels // groups, 3, 3), dtype=torch.int8)
    scale = torch.full((32,), 0.013)
    bias = torch.randn(32)
    exact = F.conv2d(
        (x.double() - 128) * 0.05, weight.double() * 0.013, bias.double(), 1, padding, 1, groups
    )
    out_scale = float(exact.abs().max() / 127)
    config = ConvConfig(
        (1, 1), (padding,) * 2, (1, 1), groups, 0.05, 128, out_scale, 128, torch.uint8
    )
    zero = torch.zeros(32, dtype=torch.int64)
    actual = OnednnConv(config, WeightTensors(weight, scale, zero, bias))(x)
    expected = (torch.round(exact / out_scale) + 128).clamp(0, 255)
    assert (actual - expected).abs().max() <= 1
    assert ((actual - expected) != 0).double().mean() < 0.01


@pytest.mark.parametrize("rows", [1, 64])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_zero_gives_exactly_zero(kind, rows):
    """A rest of 1e-7 is nothing beside the results, but a normalisation behind it makes it as large: padded
    windows of Swin v2."""
    torch.manual_seed(0)
    size = (384, 384) if kind == "linear" else (384, 384, 1, 1)
    weight = torch.randint(-127, 128, size, dtype=torch.int8)
    tensors = WeightTensors(weight, torch.rand(384) * 1e-3, torch.zeros(384).long(), None)
    if kind == "linear":
        kernel = OnednnLinear(LinearConfig(0.0297, 116, 1.0, 0, torch.float32), tensors)
        x = torch.full((rows, 384), 116, dtype=torch.uint8)
    else:
        geometry = ((1, 1), (0, 0), (1, 1), 1)
        kernel = OnednnConv(ConvConfig(*geometry, 0.0297, 116, 1.0, 0, torch.float32), tensors)
        x = torch.full((1, 384, rows, 1), 116, dtype=torch.uint8)
    assert torch.equal(kernel(x), torch.zeros_like(kernel(x)))


@pytest.mark.parametrize("bias", [0.0, 1e-9, 0.5])
def test_a_float_giving_convolution_folds_beside_a_bias_that_counts(monkeypatch, bias):
    """With a zero point oneDNN sums the weight again at every call."""
    monkeypatch.setattr("backquant.lower.kernels.conv.folds_zero_exactly", lambda: False)
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (16, 8, 3, 3), dtype=torch.int8)
    scale, x = torch.rand(16) * 1e-3, torch.randint(0, 256, (1, 8, 6, 6), dtype=torch.uint8)
    tensors = WeightTensors(weight, scale, torch.zeros(16).long(), torch.full((16,), bias))
    config = ConvConfig((1, 1), (0, 0), (1, 1), 1, 0.03, 116, 1.0, 0, torch.float32)
    kernel = OnednnConv(config, tensors)
    told: list[int] = []
    operator = torch.ops.onednn.qconv_pointwise.default
    monkeypatch.setattr(
        "torch.ops.onednn.qconv_pointwise",
        SimpleNamespace(default=lambda *args: told.append(args[2]) or operator(*args)),
    )
    real = weight.double() * scale.double().reshape(-1, 1, 1, 1)
    exact = F.conv2d((x.double() - 116) * 0.03, real) + bias
    assert torch.allclose(kernel(x).double(), exact, atol=1e-5)
    assert told[-1] == (0 if bias == 0.5 else 116)  # calls before it: whether oneDNN is right here
