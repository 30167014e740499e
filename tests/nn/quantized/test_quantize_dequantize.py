"""Quantize and dequantize as a module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from backquant.nn.quantized.quantize_dequantize import QuantizeDequantize
from backquant.observe import (
    FakeQuantize,
    MinMaxObserver,
    PlaceholderObserver,
    default_fixed_qparams_range_0to1_observer,
)


@pytest.mark.parametrize("dtype", [torch.quint8, torch.qint8])
def test_values_are_those_of_the_observers_grid(dtype: torch.dtype) -> None:
    observer = MinMaxObserver(dtype=dtype, quant_min=None, quant_max=None)
    x = torch.randn(1000)
    observer(x)
    module = QuantizeDequantize.from_observer(observer)
    assert isinstance(module, QuantizeDequantize)
    oracle = torch.quantize_per_tensor(x, float(module.scale), int(module.zero_point), dtype)
    error = (module(x) - oracle.dequantize()).abs().max()
    assert error <= module.scale  # they part at ties only
    assert torch.equal(module(module(x)), module(x))
    assert torch.equal(copy.deepcopy(module)(x), module(x))


def test_fake_quantizes_and_fixed_ranges() -> None:
    fixed = QuantizeDequantize.from_observer(default_fixed_qparams_range_0to1_observer())
    assert isinstance(fixed, QuantizeDequantize)
    assert float(fixed.scale) == 1 / 256
    faked = FakeQuantize()
    faked(torch.randn(10))
    assert isinstance(QuantizeDequantize.from_observer(faked), QuantizeDequantize)


def test_what_measures_nothing_gives_nothing() -> None:
    placeholder = PlaceholderObserver(dtype=torch.float16)
    assert QuantizeDequantize.from_observer(placeholder) is None
    assert QuantizeDequantize.from_observer(nn.Identity()) is None


def test_state_dict_round_trip() -> None:
    one = QuantizeDequantize(0.5, 3, torch.quint8, 0, 255)
    two = QuantizeDequantize(1.0, 0, torch.quint8, 0, 255)
    two.load_state_dict(one.state_dict())
    x = torch.randn(10)
    assert torch.equal(one(x), two(x))
