"""What QAT modules share: fake quantize, parameters, devices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from backquant.errors import ConfigError
from backquant.nn.qat.weight_fake_quantizer import (
    adopt,
    checked_float_module,
    fresh_float_copy,
    weight_fake_quant_of,
)


@pytest.mark.parametrize("weight", [None, "observer", lambda: None])
def test_what_gives_no_module_is_refused(weight: object) -> None:
    with pytest.raises(ConfigError, match=r"qat\.Linear needs a QConfig"):
        weight_fake_quant_of(SimpleNamespace(weight=weight), "qat.Linear")


def test_the_fake_quantize_follows_the_device() -> None:
    class WithBuffer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(1))

    qconfig = SimpleNamespace(weight=WithBuffer)
    on_meta = weight_fake_quant_of(qconfig, "qat.Linear", torch.device("meta"))
    assert on_meta.scale.device.type == "cpu"  # a module that is being built keeps its values


def test_each_module_gets_its_own() -> None:
    qconfig = SimpleNamespace(weight=nn.Identity)
    first = weight_fake_quant_of(qconfig, "qat.Linear")
    assert first is not weight_fake_quant_of(qconfig, "qat.Linear")


def test_subclasses_are_other_types() -> None:
    class Mine(nn.Linear):
        pass

    with pytest.raises(ConfigError, match=r"takes a torch.nn.modules.linear.Linear, got .*Mine"):
        checked_float_module(nn.Linear, Mine(1, 1), nn.Linear)


def test_frozen_parameters_stay_frozen() -> None:
    source = nn.Linear(2, 2)
    source.weight.requires_grad_(False)
    copy = fresh_float_copy(nn.Linear(2, 2, device="meta"), source)
    assert not copy.weight.requires_grad and copy.bias.requires_grad


def test_adopting_no_bias() -> None:
    target, source = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    adopt(target, source, source)
    assert target.bias is None and target.weight is source.weight
