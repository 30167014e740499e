from __future__ import annotations

import pytest
import torch

from backquant.errors import InputError
from backquant.graph.dialect_ops import register_quantized_decomposed
from backquant.lower.kernels.boundary import dequantize, quantize, requantize

register_quantized_decomposed()
DTYPES = [
    (torch.uint8, 0, 255),
    (torch.uint8, 0, 127),
    (torch.int8, -128, 127),
    (torch.int8, -127, 127),
]


def _qparams(number: int, dtype: torch.dtype) -> tuple[float, int]:
    generator = torch.Generator().manual_seed(number)
    scale = float(10 ** (torch.rand(1, generator=generator) * 9 - 6))
    zero_point = int(torch.randint(0, 128, (1,), generator=generator))
    return scale, zero_point - (100 if dtype is torch.int8 else 0)


@pytest.mark.parametrize(("dtype", "low", "high"), DTYPES)
@pytest.mark.parametrize("number", range(8))
def test_quantize_equals_the_decomposed_operator(dtype, low, high, number):
    scale, zero_point = _qparams(number, dtype)
    exact = torch.quantize_per_tensor  # ties are the subject of the next test
    assert exact is not None
    x = torch.randn(4001) * scale * 90
    x = torch.cat([x, torch.tensor([0.0, -0.0, 1e30, -1e30, float("inf"), -float("inf"), 1e-40])])
    scaled = x.double() / scale
    ties = ((scaled - scaled.floor()) - 0.5).abs() < 1e-4
    actual = quantize(x, scale, zero_point, low, high, dtype)
    op = torch.ops.quantized_decomposed.quantize_per_tensor.default
    expected = op(x, scale, zero_point, low, high, dtype)
    assert actual.dtype is dtype
    assert torch.equal(actual[~ties], expected[~ties])
    assert ((actual.int() - expected.int()).abs() <= 1).all()


@pytest.mark.parametrize("zero_point", [4, 5])
def test_values_between_two_integers_round_by_the_parity_of_the_zero_point(zero_point):
    x = torch.tensor([-1.5, -0.5, 0.5, 1.5, 2.5])
    actual = quantize(x, 1.0, zero_point, 0, 255, torch.uint8)
    op = torch.ops.quantized_decomposed.quantize_per_tensor.default
    same = torch.equal(actual, op(x, 1.0, zero_point, 0, 255, torch.uint8))
    by_parity = torch.equal(actual, torch.round(x + zero_point).to(torch.uint8))
    # torch's CUDA builds add the zero point after rounding
    afterwards = torch.version.cuda is not None
    assert (same, by_parity) == (zero_point == 4 or afterwards, zero_point == 4 or not afterwards)


@pytest.mark.parametrize(("dtype", "low", "high"), DTYPES)
@pytest.mark.parametrize("number", range(8))
def test_dequantize_equals_the_decomposed_operator_bit_for_bit(dtype, low, high, number):
    scale, zero_point = _qparams(number, dtype)
    q = torch.arange(256, dtype=torch.uint8).view(dtype)
    actual = dequantize(q, scale, zero_point, low, high, dtype)
    op = torch.ops.quantized_decomposed.dequantize_per_tensor.default
    assert torch.equal(actual, op(q, scale, zero_point, low, high, dtype))


def test_layouts_are_kept():
    x = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    q = quantize(x, 0.1, 3, 0, 255, torch.uint8)
    assert q.stride() == x.stride()
    assert dequantize(q, 0.1, 3, 0, 255, torch.uint8).stride() == x.stride()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64])
def test_what_the_reference_operator_refuses_is_refused(dtype):
    x = torch.ones(5).to(dtype)
    with pytest.raises(AssertionError):
        torch.ops.quantized_decomposed.quantize_per_tensor(x, 0.1, 3, 0, 255, torch.uint8)
    with pytest.raises(InputError, match="quantizes float32"):
        quantize(x, 0.1, 3, 0, 255, torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_floats_are_quantized_through_float32(dtype):
    x = torch.randn(50).to(dtype)
    expected = quantize(x.float(), 0.1, 3, 0, 255, torch.uint8)
    assert torch.equal(quantize(x, 0.1, 3, 0, 255, torch.uint8), expected)


def test_requantize_is_dequantize_then_quantize():
    x = torch.arange(256, dtype=torch.uint8)
    value = dequantize(x, 0.1, 7, 0, 255, torch.uint8)
    expected = quantize(value, 0.3, -20, -128, 127, torch.int8)
    assert torch.equal(requantize(x, 0.1, 7, 0.3, -20, -128, 127, torch.int8), expected)
