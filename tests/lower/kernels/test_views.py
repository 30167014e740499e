from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from backquant.lower.kernels.prepared import ConvWeight, prepared_conv
from backquant.lower.kernels.repacked import pack_linear
from backquant.lower.kernels.views import (
    as_quantized,
    integer_view,
    quantized_view,
    quantized_weight,
)

SHAPES = [
    lambda x: x,
    lambda x: x.contiguous(memory_format=torch.channels_last),
    lambda x: x[1:, :, ::2],
    lambda x: x.permute(0, 2, 3, 1),
    lambda x: x[:0],
    lambda x: x[0, 0, 0, 0],
    lambda x: x[:, :1].expand(-1, 3, -1, -1),
]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
@pytest.mark.parametrize("shape", SHAPES)
def test_views_share_memory_and_layout_both_ways(dtype, shape):
    x = shape(torch.randint(0, 100, (2, 3, 4, 5)).to(dtype))
    q = quantized_view(x, 0.5, 3)
    assert (q.shape, q.stride(), q.storage_offset()) == (x.shape, x.stride(), x.storage_offset())
    assert q.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert (q.q_scale(), q.q_zero_point()) == (0.5, 3)
    assert torch.equal(q.int_repr(), x)
    back = integer_view(q)
    assert (back.dtype, back.stride()) == (dtype, x.stride())
    assert back.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert torch.equal(back, x)


def test_a_view_keeps_the_memory_alive():
    q = quantized_view(torch.full((1000,), 7, dtype=torch.uint8), 1.0, 0)
    assert torch.equal(q.int_repr(), torch.full((1000,), 7, dtype=torch.uint8))


def test_torchs_deprecation_is_not_shown_to_users():
    code = (
        "import torch, warnings; warnings.simplefilter('error')\n"
        "from backquant.lower.kernels import boundary, elementwise\n"
        "x = boundary.quantize(torch.randn(4), 0.1, 3, 0, 255, torch.uint8)\n"
        "elementwise.add(x, 0.1, 3, x, 0.1, 3, 0.2, 5)\n"
        "boundary.dequantize(x, 0.1, 3, 0, 255, torch.uint8)\n"
    )
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], check=True)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("side", [5, 300])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_small_and_large_tensors_become_quantized_with_their_layout(dtype, side, shape):
    x = shape(torch.randint(0, 100, (2, 3, side, side + 1)).to(dtype))
    q = as_quantized(x, 0.5, 3)
    assert torch.equal(q.int_repr(), x)
    assert (q.q_scale(), q.q_zero_point(), q.shape) == (0.5, 3, x.shape)
    for layout in (torch.contiguous_format, torch.channels_last):
        if x.dim() == 4 and x.is_contiguous(memory_format=layout):
            assert q.is_contiguous(memory_format=layout)


def test_tensors_of_one_kind_do_not_share_state():
    x = torch.arange(200_000, dtype=torch.int32).to(torch.uint8)
    first, second = quantized_view(x, 0.5, 3), quantized_view(x[:7], 0.5, 3)
    assert (first.numel(), second.numel()) == (200_000, 7)


@pytest.mark.parametrize("scales", [1, 6])
@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (6, 4, 1, 1), (6, 20)])
@pytest.mark.parametrize("laid", ["contiguous", "channels last", "every other"])
def test_a_weight_is_what_torch_makes_of_it(scales: int, shape: tuple[int, ...], laid: str) -> None:
    generator = torch.Generator().manual_seed(scales + len(shape))
    weight = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
    if laid == "channels last" and len(shape) == 4:
        weight = weight.contiguous(memory_format=torch.channels_last)
    if laid == "every other":
        weight = weight.repeat_interleave(2, 1)[:, ::2]
    scale, zeros = torch.rand(scales), torch.arange(scales)
    if scales == 1:
        wanted = torch._make_per_tensor_quantized_tensor(weight, float(scale), 0)
    else:
        wanted = torch._make_per_channel_quantized_tensor(weight, scale, zeros, 0)
    found = quantized_weight(weight, scale, zeros)
    assert torch.equal(found.int_repr(), wanted.int_repr())
    assert torch.equal(found.dequantize(), wanted.dequantize())
    assert (found.data_ptr() == weight.data_ptr()) == (laid != "every other")


def test_packed_weights_hold_no_copy_of_the_integers() -> None:
    """They keep the tensor that they were made from, which is the kernel's own buffer."""
    ops = torch.ops.quantized
    weight = torch.randint(-128, 128, (16, 8, 3, 3), dtype=torch.int8)
    conv = ConvWeight(weight, torch.rand(16) + 0.1, None, (1, 1), (1, 1), (1, 1), 1)
    image = prepared_conv(conv)
    rows = weight.reshape(16, -1)
    packed = pack_linear("onednn", rows, torch.rand(16) + 0.1, torch.zeros(16).long(), None)
    weight.fill_(3)
    for held in (ops.conv2d_unpack(image)[0], ops.linear_unpack(packed)[0]):
        assert (held.int_repr() == 3).all()
