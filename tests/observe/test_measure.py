"""Qparams of every kind of observer."""

from __future__ import annotations

import pytest
import torch
from torch.ao.quantization.observer import MinMaxObserver as TorchMinMax

from backquant.observe import (
    FakeQuantize,
    FixedQParamsObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)
from backquant.observe.protocol import measure


def test_per_tensor():
    observer = MinMaxObserver(dtype=torch.qint8, quant_min=-100, quant_max=100)
    observer(torch.tensor([-1.0, 1.0]))
    found = measure(observer)
    assert (found.quant_min, found.quant_max, found.storage) == (-100, 100, torch.int8)
    assert found.number.scale == pytest.approx(0.01)
    assert found.axis is None


def test_per_channel():
    observer = PerChannelMinMaxObserver(ch_axis=1, dtype=torch.qint8)
    observer(torch.randn(2, 3))
    found = measure(observer)
    assert found.axis == 1
    assert found.scale.shape == found.zero_point.shape == (3,)


def test_a_copy_is_taken():
    observer = FixedQParamsObserver(scale=0.5, zero_point=3)
    found = measure(observer)
    observer.scale.fill_(9.0)
    assert (found.number.scale, found.number.zero_point) == (0.5, 3)


@pytest.mark.parametrize(
    ("dtype", "bounds"),
    [(torch.quint8, (0, 255)), (torch.qint8, (-128, 127)), (torch.float16, (0, 0))],
)
def test_dynamic(dtype, bounds):
    found = measure(PlaceholderObserver(dtype=dtype, is_dynamic=True))
    assert found.is_dynamic
    assert found.scale is None
    assert (found.quant_min, found.quant_max) == bounds


def test_fake_quantizers():
    fake = FakeQuantize(quant_min=0, quant_max=127)
    fake(torch.tensor([0.0, 1.27]))
    found = measure(fake)
    assert (found.quant_max, found.dtype) == (127, torch.quint8)
    assert found.number.scale == pytest.approx(0.01)


def test_observers_written_against_torch_work_by_protocol():
    class Mine(TorchMinMax):
        pass

    observer = Mine()
    observer(torch.tensor([0.0, 2.55]))
    assert measure(observer).number.scale == pytest.approx(0.01)
