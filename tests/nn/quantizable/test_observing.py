"""Filling slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from backquant.errors import ConfigError
from backquant.nn.quantizable.observing import observe, require_qconfig
from backquant.nn.quantizable.slots import SlotLinear, SlotQATLinear, SlotSigmoid, SlotTanh
from backquant.observe import FakeQuantize, MinMaxObserver, is_fixed_qparams


def _block() -> nn.Sequential:
    return nn.Sequential(
        SlotLinear(2, 2), SlotSigmoid(), SlotTanh(), nn.Sequential(SlotLinear(2, 2))
    )


def test_calibration_measures_all_but_fixed_ranges() -> None:
    block = _block().eval()
    observe(block, SimpleNamespace(activation=MinMaxObserver, weight=MinMaxObserver))
    filled = [getattr(part, "activation_post_process", None) for part in block.modules()]
    assert [type(slot) for slot in filled if slot is not None] == [MinMaxObserver] * 2
    assert block[1].activation_post_process is block[2].activation_post_process is None
    assert block[0].activation_post_process is not block[3][0].activation_post_process


def test_training_fakes_weights_and_fixes_ranges() -> None:
    block = _block()
    weight = block[0].weight
    observe(block, SimpleNamespace(activation=FakeQuantize, weight=FakeQuantize))
    assert type(block[0]) is SlotQATLinear and type(block[3][0]) is SlotQATLinear
    assert block[0].weight is weight
    assert isinstance(block[0].weight_fake_quant, FakeQuantize)
    assert is_fixed_qparams(block[1].activation_post_process)
    assert is_fixed_qparams(block[2].activation_post_process)


def test_a_part_has_its_own_qconfig_or_none() -> None:
    block = _block().eval()
    block[0].qconfig = None
    block[3][0].qconfig = SimpleNamespace(activation=nn.Identity)
    observe(block, SimpleNamespace(activation=MinMaxObserver))
    assert block[0].activation_post_process is None
    assert isinstance(block[3][0].activation_post_process, nn.Identity)


@pytest.mark.parametrize("given", [None, "given"])
def test_the_modules_own_qconfig_comes_first(given: Any) -> None:
    module = nn.LSTM(1, 1)
    if given is None:
        with pytest.raises(ConfigError, match="the LSTM to observe has no qconfig"):
            require_qconfig(module, "quantizable.LSTM")
    module.qconfig = "own"
    assert require_qconfig(module, "quantizable.LSTM", given) == "own"


def test_observers_see_the_data() -> None:
    block = nn.Sequential(SlotLinear(2, 2)).eval()
    observe(block, SimpleNamespace(activation=MinMaxObserver))
    y = block(torch.randn(5, 2))
    assert torch.equal(block[0].activation_post_process.max_val, y.detach().max())
