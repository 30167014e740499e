from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from backquant.lower.kernels.views import as_quantized, integer_view, quantized_view

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
