from __future__ import annotations

import torch
import torch.ao.quantization as ao
from torch import nn

from backquant import observe
from backquant.observe import (
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
)


def test_every_fake_quantizer_of_a_model_switches_also_pytorchs() -> None:
    parts = [FakeQuantize(), FusedMovingAvgObsFakeQuantize(), ao.FakeQuantize(), nn.ReLU()]
    model = nn.Sequential(*parts)
    for apply, name, value in (
        (disable_fake_quant, "fake_quant_enabled", 0),
        (enable_fake_quant, "fake_quant_enabled", 1),
        (disable_observer, "observer_enabled", 0),
        (enable_observer, "observer_enabled", 1),
    ):
        model.apply(apply)
        assert [getattr(p, name).item() for p in parts[:3]] == [value] * 3


def test_switched_off_observers_keep_and_switched_off_rounding_passes() -> None:
    fake = observe.FakeQuantize(observer=observe.MinMaxObserver)
    fake(torch.tensor([0.0, 1.0]))
    scale = fake.scale.clone()
    disable_observer(fake)
    fake(torch.tensor([0.0, 100.0]))
    assert torch.equal(fake.scale, scale)
    disable_fake_quant(fake)
    x = torch.tensor([0.1234567])
    assert torch.equal(fake(x), x)
