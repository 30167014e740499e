"""Inputs of another dtype than the calibration data: computed as their float32 values, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant
from backquant import InputError

DATA = [torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(s)) for s in range(3)]
BACKENDS = ["x86", "onnxruntime", "tensorrt", "tensorrt_fp8", "litert_16x8"]


def _quantized(backend: str) -> backquant.QuantizedModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4)).eval()
    return backquant.quantize(model, calibration=DATA, backend=backend, slower="keep")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_as_its_values(backend: str, dtype: torch.dtype) -> None:
    quantized, half = _quantized(backend), DATA[0].to(dtype)
    for _ in range(3):  # interpreted, then recorded
        assert torch.equal(quantized(half), quantized(half.float()))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8, torch.int64, torch.bool])
def test_other_dtypes_are_refused(backend: str, dtype: torch.dtype) -> None:
    """Bytes of a camera among them: 0..255, where the model was calibrated on normalized images."""
    quantized = _quantized(backend)
    for _ in range(3):
        with pytest.raises(InputError, match="float32"):
            quantized(DATA[0].to(dtype))
