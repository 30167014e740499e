"""No calibration data: the fixes that are printed work on this very model and backend (pytorch#123824)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant
from backquant import QConfigMapping
from backquant.errors import CalibrationError, CoverageError
from backquant.qconfig import default_dynamic_qconfig

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
DYNAMIC = "QConfigMapping().set_global(default_dynamic_qconfig)"
BACKENDS = [
    name
    for name in backquant.list_backends()
    if name
    not in (
        "qnnpack_pt2e",
        "x86_lowbit",
        "compressed_tensors",
        "gptq",
        "awq",
        "mlx",
        "torchao",
        "gguf",
    )
]  # the others quantize weights alone, or exported graphs


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_printed_works(backend: str) -> None:
    with pytest.raises(CalibrationError) as raised:
        backquant.quantize(mlp(), X, backend=backend)
    assert raised.value.fix.startswith("calibration=[batch, ...]")
    assert backquant.quantize(mlp(), X, backend=backend, calibration=[X]).report.coverage == 1
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    if DYNAMIC in raised.value.fix:
        quantized = backquant.quantize(mlp(), X, backend=backend, qconfig_mapping=mapping)
        assert quantized.report.coverage == 1
    else:
        with pytest.raises(CoverageError):
            backquant.quantize(mlp(), X, backend=backend, qconfig_mapping=mapping)


def test_a_convolution_alone_has_no_such_fix() -> None:
    """PyTorch's engines quantize linear layers at each call, not convolutions."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    with pytest.raises(CalibrationError) as raised:
        backquant.quantize(model, torch.rand(1, 3, 8, 8), backend="x86")
    assert raised.value.fix == "calibration=[batch, ...]"
