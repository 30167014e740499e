"""Defects of torch's own kernels that ours go around.

Those of resizing and pooling are shown on torch's kernels: such a test fails when torch mends one. Of
oneDNN's convolutions, and of norms, which read memory beyond a buffer, only ours are compared.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from backquant.lower.kernels.conv import ConvConfig, OnednnConv
from backquant.lower.kernels.norm import Norm, NormConfig
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.kernels.pooling import (
    adaptive_avg_pool1d,
    adaptive_avg_pool2d,
    adaptive_avg_pool3d,
    avg_pool1d,
)
from backquant.lower.kernels.resize import resize_bilinear
from backquant.lower.kernels.views import laid_out, quantized_view


def _tokens(channels: int, size: tuple[int, int]) -> torch.Tensor:
    """An image made of tokens, as in Segformer."""
    rows = torch.randint(0, 256, (1, size[0] * size[1], channels), dtype=torch.uint8)
    return rows.transpose(1, 2).reshape(1, channels, *size)


def _far(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found.float() - expected.float()).abs().max().item()


def test_interpolate_of_tokens_at_the_same_size() -> None:
    x = _tokens(256, (24, 24))
    torchs = F.interpolate(quantized_view(x, 0.1, 3), (24, 24), mode="bilinear").int_repr()
    assert _far(torchs, x) > 100
    assert torch.equal(resize_bilinear(x, 0.1, 3, (24, 24), None, None, None), x)


def test_interpolate_of_one_pixel() -> None:
    x = torch.arange(65, dtype=torch.uint8).reshape(1, 65, 1, 1)
    torchs = F.interpolate(quantized_view(x, 0.1, 3), (2, 2), mode="bilinear").int_repr()
    assert _far(torchs, x.expand(1, 65, 2, 2)) > 10
    ours = resize_bilinear(x, 0.1, 3, (2, 2), None, None, None)
    assert torch.equal(ours, x.expand(1, 65, 2, 2))
    assert torch.equal(adaptive_avg_pool2d(x, 0.1, 3, (2, 2)), x.expand(1, 65, 2, 2))


def test_pooling_of_transposed_sequences() -> None:
    # as a reshape of a transposed view leaves it: the stride of the batch is that of no new tensor
    x = torch.randint(0, 256, (16 * 35,), dtype=torch.uint8).as_strided((1, 16, 35), (16, 1, 16))
    expected = F.avg_pool1d(x.contiguous().float(), 3, 3)
    torchs = F.avg_pool1d(quantized_view(x, 1.0, 0), 3, 3).int_repr()
    assert _far(torchs, expected) > 100
    assert _far(avg_pool1d(x, 1.0, 0, [3], [3], [0], False, True), expected) <= 0.51


def test_adaptive_pooling_of_permuted_single_pixels() -> None:
    x = torch.randint(0, 256, (5, 1, 3), dtype=torch.uint8).permute(2, 0, 1)
    torchs = F.adaptive_avg_pool2d(quantized_view(x.unsqueeze(-2).contiguous(), 1.0, 0), [1, 3])
    assert _far(torchs.int_repr().squeeze(-2), x.expand(3, 5, 3)) > 10
    assert torch.equal(adaptive_avg_pool1d(x, 1.0, 0, [3]), x.expand(3, 5, 3))


def test_adaptive_pooling_of_one_volume_of_single_voxels() -> None:
    x = torch.randint(0, 256, (3, 1, 1, 1), dtype=torch.uint8)
    torchs = F.adaptive_avg_pool3d(quantized_view(x, 1.0, 0), [3, 3, 3]).int_repr()
    assert _far(torchs, x.expand(3, 3, 3, 3)) > 10
    assert torch.equal(adaptive_avg_pool3d(x, 1.0, 0, [3, 3, 3]), x.expand(3, 3, 3, 3))


def test_a_layout_is_what_a_new_tensor_has() -> None:
    x = _tokens(8, (2, 3))
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert (
        laid_out(x).stride()
        == torch.empty_like(torch.empty(1, 8, 2, 3), memory_format=torch.channels_last).stride()
    )
    for view in (x, x[:, ::2], x.transpose(2, 3), x[:, :1].expand(1, 8, 2, 3)):
        assert torch.equal(laid_out(view), view)


def test_convolutions_to_a_width_of_one() -> None:
    """On AMX oneDNN gives wrong rows; ours are right on any CPU."""
    weight = torch.randint(-50, 51, (32, 16, 3, 3), dtype=torch.int8)
    tensors = WeightTensors(weight, torch.ones(1), torch.zeros(1, dtype=torch.int64), None)
    x = torch.randint(0, 100, (2, 16, 12, 4), dtype=torch.uint8)
    expected = F.conv2d(x.double() - 63, weight.double(), stride=2)
    config = ConvConfig((2, 2), (0, 0), (1, 1), 1, 1.0, 63, 1.0, 0, torch.float32)
    found = OnednnConv(config, tensors)(x)
    assert torch.equal(found.double(), expected)


def test_windows_in_the_padding() -> None:
    """oneDNN gives undefined values where a window lies in the padding as a whole."""
    weight = torch.randint(-50, 51, (16, 16, 5, 2), dtype=torch.int8)
    tensors = WeightTensors(weight, torch.ones(1), torch.zeros(1, dtype=torch.int64), None)
    x = torch.randint(0, 100, (1, 16, 8, 1), dtype=torch.uint8)
    expected = F.conv2d(x.double() - 63, weight.double(), padding=1, dilation=2)
    config = ConvConfig((1, 1), (1, 1), (2, 2), 1, 1.0, 63, 1.0, 0, torch.float32)
    assert torch.equal(OnednnConv(config, tensors)(x).double(), expected)


def test_3d_convolutions_whose_stride_skips_elements() -> None:
    """On AMX oneDNN writes beyond its buffers."""
    weight = torch.randint(-50, 51, (16, 32, 1, 1, 3), dtype=torch.int8)
    tensors = WeightTensors(weight, torch.ones(1), torch.zeros(1, dtype=torch.int64), None)
    x = torch.randint(0, 100, (2, 32, 14, 6, 9), dtype=torch.uint8)
    expected = F.conv3d(x.double() - 63, weight.double(), stride=(3, 3, 2))
    config = ConvConfig((3, 3, 2), (0,) * 3, (1,) * 3, 1, 1.0, 63, 1.0, 0, torch.float32)
    assert torch.equal(OnednnConv(config, tensors)(x).double(), expected)


@pytest.mark.parametrize("kind", ["group", "instance"])
@pytest.mark.parametrize(
    "batch, size", [(64, (1, 7, 7)), (17, (1, 4, 4)), (3, (1, 1, 1)), (9, (2, 2, 2))]
)
def test_norms_of_large_batches_of_small_maps(kind: str, batch: int, size: tuple[int, ...]) -> None:
    weight, bias = torch.rand(6) + 0.5, torch.randn(6)
    kernel = Norm(NormConfig(kind, (6,), 1e-5, 0.1, 128, 0.05, 120), weight, bias)
    for spatial in (size, size[1:]):
        x = torch.randint(0, 256, (batch, 6, *spatial), dtype=torch.uint8)
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        expected = F.group_norm((x.double() - 128) * 0.1, 6, weight.double(), bias.double())
        expected = (expected / 0.05 + 120).round().clamp(0, 255)
        for memory_format in (torch.contiguous_format, last):
            assert _far(kernel(x.contiguous(memory_format=memory_format)), expected) <= 1


@pytest.mark.parametrize("shape", [(1, 12), (5, 12), (64, 12), (5, 12, 3)])
def test_norms_of_groups_of_vectors(shape: tuple[int, ...]) -> None:
    """The kernel wants an axis of positions."""
    weight, bias = torch.rand(12) + 0.5, torch.randn(12)
    kernel = Norm(NormConfig("group", (3,), 1e-5, 0.1, 128, 0.05, 120), weight, bias)
    x = torch.randint(0, 256, shape, dtype=torch.uint8)
    expected = F.group_norm((x.double() - 128) * 0.1, 3, weight.double(), bias.double())
    assert kernel(x).shape == x.shape
    assert _far(kernel(x), (expected / 0.05 + 120).round().clamp(0, 255)) <= 1


def test_norms_of_nearly_constant_groups() -> None:
    """The square of the mean is taken from the mean of the squares, in float32: of small differences
    some steps are lost."""
    x = torch.full((1, 1, 4096), 135, dtype=torch.uint8)
    x[..., 0] += 1
    expected = F.group_norm(x.double() * 0.5, 1)
    scale = float(expected.max()) / 100
    far = _far(
        Norm(NormConfig("group", (1,), 1e-5, 0.5, 135, scale, 0), None, None)(x),
        (expected / scale).round().clamp(0, 255),
    )
    assert 1 < far < 100


@pytest.mark.parametrize("kind", ["group", "instance", "layer"])
@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (2, 4, 0, 3), (2, 4, 0)])
def test_norms_of_no_values(kind: str, shape: tuple[int, ...]) -> None:
    # quantized::group_norm of no positions, channels last, ends the process: it divides by their number
    size = {"group": (2,), "instance": (), "layer": shape[-1:]}[kind]
    x = torch.zeros(shape, dtype=torch.uint8)
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    kernel = Norm(NormConfig(kind, size, 1e-5, 0.1, 3, 0.1, 3), None, None)
    found = kernel(x)
    assert found.shape == x.shape and found.dtype == torch.uint8
