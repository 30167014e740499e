"""Integer arithmetic of weights against ``torch.quantize_per_tensor`` and ``…_per_channel``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.nn.quantized.reference.rounding import same_integers

from backquant.dtypes import arithmetic, dequantize_tensor
from backquant.errors import ConfigError
from backquant.nn.quantized.reference import weights
from backquant.nn.quantized.reference.weights import (
    quantize_weight,
    weight_qparams,
)

RANGES = {torch.qint8: (-128, 127), torch.quint8: (0, 255), torch.qint32: (-1000, 1000)}


def _weight(case: int) -> torch.Tensor:
    scale = 10.0 ** float(torch.empty(1).uniform_(-4, 4))
    weight = torch.randn(24, 50) * scale
    return torch.round(weight / scale * 8) / 8 if case % 3 == 0 else weight


def _both(weight: torch.Tensor, **qparams: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q = weight_qparams(qparams)
    quantized = quantize_weight(weight, q)
    return quantized, dequantize_tensor(quantized, q.scale, q.zero_point, q.axis)


@pytest.mark.parametrize("dtype", RANGES)
def test_per_tensor_is_bit_equal(dtype: torch.dtype) -> None:
    for case in range(60):
        weight = _weight(case)
        zero_point = int(torch.randint(*RANGES[dtype], (1,)))
        scale = 0.25 if case % 3 == 0 else float(weight.abs().max() / 90 * torch.rand(1) + 1e-9)
        oracle = torch.quantize_per_tensor(weight, scale, zero_point, dtype)
        quantized, dequantized = _both(
            weight,
            qscheme=torch.per_tensor_affine,
            dtype=dtype,
            scale=scale,
            zero_point=zero_point,
        )
        integers = oracle.int_repr()
        assert same_integers(quantized, integers)
        equal = quantized == integers
        assert torch.equal(dequantized[equal], oracle.dequantize()[equal])


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", RANGES)
def test_per_channel_is_bit_equal(dtype: torch.dtype, axis: int) -> None:
    for case in range(40):
        weight = _weight(case)
        channels = weight.shape[axis]
        zero_point = torch.randint(*RANGES[dtype], (channels,))
        scale = torch.rand(channels) * weight.abs().max() / 45 + 1e-9
        if case % 3 == 0:
            scale = torch.full((channels,), 0.25)
        oracle = torch.quantize_per_channel(weight, scale, zero_point, axis % 2, dtype)
        quantized, dequantized = _both(
            weight,
            qscheme=torch.per_channel_affine,
            dtype=dtype,
            scale=scale,
            zero_point=zero_point,
            axis=axis,
        )
        integers = oracle.int_repr()
        assert same_integers(quantized, integers)
        equal = quantized == integers
        assert torch.equal(dequantized[equal], oracle.dequantize()[equal])


@pytest.mark.parametrize(("dtype", "top"), [(torch.quint8, 255), (torch.quint4x2, 15)])
def test_float_qparams_are_bit_equal(dtype: torch.dtype, top: int) -> None:
    for case in range(40):
        weight = _weight(case)
        scale = torch.rand(24) * weight.abs().max() / top * 2 + 1e-9
        zero_point = torch.rand(24) * top
        oracle = torch.quantize_per_channel(weight, scale, zero_point, 0, dtype)
        integers = oracle.int_repr()
        if dtype == torch.quint4x2:  # two values in a byte, the even column in the low bits
            integers = torch.stack([integers & 15, integers >> 4], -1).reshape(weight.shape)
        quantized, dequantized = _both(
            weight,
            qscheme=torch.per_channel_affine_float_qparams,
            dtype=dtype,
            scale=scale,
            zero_point=zero_point,
            axis=0,
        )
        assert torch.equal(quantized, integers)
        assert torch.equal(dequantized, oracle.dequantize())


def test_values_at_ties_are_bit_equal() -> None:
    for size in (1, 3, 7, 8, 15, 31, 33, 64, 127):
        for _ in range(20):
            scale = float(torch.rand(1) * 0.03 + 1e-4)
            zero_point = int(torch.randint(-128, 128, (1,)))
            halves = torch.randint(-128 - zero_point, 128 - zero_point, (size,)) + 0.5
            weight = halves * torch.tensor(scale) * (1 + torch.randint(-2, 3, (size,)) * 2**-23)
            oracle = torch.quantize_per_tensor(weight, scale, zero_point, torch.qint8)
            quantized, _ = _both(
                weight,
                qscheme=torch.per_tensor_affine,
                dtype=torch.qint8,
                scale=scale,
                zero_point=zero_point,
            )
            assert same_integers(quantized, oracle.int_repr())


def test_bounds_clamp_the_integers() -> None:
    """PyTorch's reference modules ignore them unless they are ``is_decomposed``."""
    quantized, _ = _both(
        torch.tensor([-9.0, 9.0]),
        qscheme=torch.per_tensor_affine,
        dtype=torch.qint8,
        scale=0.01,
        zero_point=0,
        quant_min=-127,
        quant_max=100,
    )
    assert quantized.tolist() == [-127, 100]


def test_channels_last_is_kept() -> None:
    weight = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last)
    qparams = {"qscheme": torch.per_channel_affine, "dtype": torch.qint8, "axis": 0}
    quantized, dequantized = _both(
        weight, scale=torch.ones(4), zero_point=torch.zeros(4), **qparams
    )
    assert quantized.is_contiguous(memory_format=torch.channels_last)
    assert dequantized.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_weight_without_qscheme_is_only_cast(dtype: torch.dtype) -> None:
    weight = torch.randn(5)
    quantized, dequantized = _both(weight, qscheme=None, dtype=dtype)
    assert quantized.dtype == dtype
    assert torch.equal(dequantized, weight.to(dtype).float())
    assert quantized.data_ptr() != weight.data_ptr()


def test_float16_saturates() -> None:
    quantized, _ = _both(torch.tensor([1e6, -1e6]), qscheme=None, dtype=torch.float16)
    assert quantized.tolist() == [65504.0, -65504.0]


GOOD: dict[str, Any] = {
    "qscheme": torch.per_channel_affine,
    "dtype": torch.qint8,
    "scale": torch.ones(2),
    "zero_point": torch.zeros(2),
    "axis": 0,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float32}, "is stored as integers"),
        ({"qscheme": None}, "stays floating point"),
        ({"qscheme": "per_tensor"}, "not a scheme"),
        ({"scale": None}, "has no 'scale'"),
        ({"zero_point": None}, "has no 'zero_point'"),
        ({"axis": None}, "has no 'axis'"),
        ({"scale": torch.ones(3)}, "one zero point per channel"),
        ({"scale": torch.tensor([1.0, 0.0])}, "positive and finite"),
        ({"scale": torch.tensor([1.0, float("nan")])}, "positive and finite"),
        ({"qscheme": torch.per_tensor_affine}, "has one scale, got 2"),
        ({"quant_min": -129}, "not within"),
        ({"quant_min": 5, "quant_max": 5}, "not within"),
        ({"axis": 1}, "do not fit a weight of shape"),
        ({"axis": 2}, "do not fit a weight of shape"),
    ],
)
def test_bad_qparams_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        quantize_weight(torch.zeros(2, 3), weight_qparams({**GOOD, **change}))
    assert error.value.where and error.value.fix


def test_only_float32_is_quantized() -> None:
    with pytest.raises(ConfigError, match="only float32"):
        quantize_weight(torch.zeros(2, 3).double(), weight_qparams(GOOD))


def test_no_warning_and_no_quantized_tensor(recwarn: pytest.WarningsRecorder) -> None:
    quantized, dequantized = _both(torch.randn(2, 3), **GOOD)
    assert not quantized.is_quantized and not dequantized.is_quantized
    assert not recwarn.list


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
@pytest.mark.parametrize("channels_last", [False, True])
def test_large_weights_are_rounded_in_parts(
    monkeypatch: pytest.MonkeyPatch, axis: int | None, dtype: torch.dtype, channels_last: bool
) -> None:
    weight = torch.randn(7, 6, 3, 3)
    if channels_last:
        weight = weight.to(memory_format=torch.channels_last)
    channels = 1 if axis is None else weight.size(axis)
    values: dict[str, object] = {
        "qscheme": torch.per_tensor_affine if axis is None else torch.per_channel_affine,
        "dtype": dtype,
        "scale": torch.rand(channels) + 0.1,
        "zero_point": torch.arange(channels),
        "axis": axis,
    }
    qparams = weights.weight_qparams(values)
    whole = weights.quantize_weight(weight, qparams)
    for part in (1, 100, 200):
        monkeypatch.setattr(arithmetic, "_PART", part)
        made = weights.quantize_weight(weight, qparams)
        assert torch.equal(made, whole) and made.dtype == whole.dtype
        assert made.stride() == whole.stride()
