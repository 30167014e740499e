"""The linear in training for dynamic quantization."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.ao.nn.qat.dynamic as oracle
from torch import nn
from torch.ao.quantization.qconfig import default_dynamic_qat_qconfig

from backquant.errors import ConfigError
from backquant.nn.qat import dynamic


def test_bit_equal() -> None:
    linear = nn.Linear(5, 6)
    linear.qconfig = default_dynamic_qat_qconfig
    ours = dynamic.Linear.from_float(copy.deepcopy(linear))
    theirs = oracle.Linear.from_float(linear)
    x = torch.randn(3, 5)
    for module in (ours, theirs):
        module(x).square().sum().backward()
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.weight.grad, theirs.weight.grad)
    assert type(ours.to_float()) is nn.Linear


def test_an_observer_with_memory_is_refused(own_qat_qconfig: Any) -> None:
    with pytest.raises(ConfigError, match="needs an observer without memory") as error:
        dynamic.Linear(5, 6, qconfig=own_qat_qconfig)
    assert "averaging_constant=1" in error.value.fix
