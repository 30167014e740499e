"""The linear in training against ``torch.ao.nn.qat``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.ao.nn.qat as oracle
from torch import nn
from torch.nn.utils import parametrize

from backquant.errors import ConfigError
from backquant.nn import qat


@pytest.mark.parametrize("bias", [True, False])
def test_bit_equal_in_training(bias: bool, qat_qconfig: Any) -> None:
    linear = nn.Linear(5, 6, bias=bias)
    linear.qconfig = qat_qconfig
    ours = qat.Linear.from_float(copy.deepcopy(linear))
    theirs = oracle.Linear.from_float(linear)
    x = torch.randn(3, 4, 5)
    for _ in range(4):
        for module in (ours, theirs):
            module.zero_grad()
            module(x).square().sum().backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.sub_(0.01 * parameter.grad)
    assert torch.equal(ours(x), theirs(x))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours.to_float()(x), theirs.to_float()(x))


def test_parametrizations_come_along(qat_qconfig: Any) -> None:
    linear = nn.Linear(5, 6)
    linear.qconfig = qat_qconfig
    parametrize.register_parametrization(linear, "weight", nn.Identity())
    ours = qat.Linear.from_float(linear)
    assert parametrize.is_parametrized(ours, "weight")
    x = torch.randn(2, 5)
    assert torch.equal(ours.to_float()(x), linear(x))


def test_tied_weights_stay_tied(qat_qconfig: Any) -> None:
    embedding, linear = nn.Embedding(6, 5), nn.Linear(5, 6, bias=False)
    linear.weight = embedding.weight
    linear.qconfig = qat_qconfig
    assert qat.Linear.from_float(linear).weight is embedding.weight


def test_refusals(qat_qconfig: Any) -> None:
    with pytest.raises(ConfigError, match="has no qconfig"):
        qat.Linear.from_float(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="got None"):
        qat.Linear(1, 1)
    assert qat.Linear(1, 1, True, qat_qconfig).qconfig is qat_qconfig
