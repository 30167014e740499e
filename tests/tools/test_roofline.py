"""What ``benchmarks.roofline`` counts as the work of a model."""

from __future__ import annotations

import shutil

import pytest
import torch
from benchmarks.roofline import Limits, RoofRow, Work, measured_limits, work_of
from torch import nn

import backquant
from backquant.native.plan import has_kernels


def test_multiply_adds_and_bytes_of_layers_with_weights() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10)
    ).eval()
    x = torch.randn(1, 3, 6, 6)
    quantized = backquant.quantize(model, x, backend="x86", calibration=[x], slower="keep")
    weights = sum(parameter.numel() for parameter in model.parameters())
    moved = 3 * 36 + 8 * 16 + 8 * 16 + 10  # in and out of the convolution, and of the linear layer
    products = 8 * 16 * 27 + 128 * 10
    assert work_of(model, quantized, x) == Work(products, weights + moved)


def test_a_row_names_the_slower_of_the_two_limits() -> None:
    row = RoofRow("net", Work(2_000_000_000, 4_000_000), by_products=8.0, by_bytes=2.0, ms=10.0)
    assert str(row) == "| net | 2.00 | 4.0 | 8.00 | 10.00 | 80 % | 80 % | 20 % |"


@pytest.mark.skipif(not has_kernels(), reason="this CPU has no AVX-512 VNNI")
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_limits_are_measured() -> None:
    found = measured_limits()
    assert isinstance(found, Limits)
    assert found.products > 1e10 and found.cache > 1e8 and found.memory > 1e8
