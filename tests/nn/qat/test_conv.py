"""Plain convolutions in training against ``torch.ao.nn.qat``."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.ao.nn.qat as oracle
from torch import nn
from torch.ao.quantization import disable_observer
from torch.nn.utils import parametrize

from backquant.errors import ConfigError
from backquant.nn import qat

NAMES = ["Conv1d", "Conv2d", "Conv3d"]


def _pair(name: str, qconfig: Any, **options: Any) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    conv = getattr(nn, name)(4, 6, 3, **options)
    conv.qconfig = qconfig
    ours = getattr(qat, name).from_float(copy.deepcopy(conv))
    theirs = getattr(oracle, name).from_float(conv)
    return ours, theirs, torch.randn(2, 4, *[6] * int(name[-2]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"groups": 2, "bias": False}, {"padding": "same"}])
def test_bit_equal_in_training(name: str, options: dict[str, Any], qat_qconfig: Any) -> None:
    ours, theirs, x = _pair(name, qat_qconfig, **options)
    for _ in range(4):
        for module in (ours, theirs):
            module.zero_grad()
            module(x).square().sum().backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.sub_(0.01 * parameter.grad)
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.weight, theirs.weight)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.to_float()(x), theirs.to_float()(x))
    assert type(ours.to_float()) is getattr(nn, name)


@pytest.mark.parametrize("name", NAMES)
def test_copies(name: str, qat_qconfig: Any) -> None:
    ours, _, x = _pair(name, qat_qconfig)
    ours(x)
    ours.apply(disable_observer)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(twin(x), ours(x))


def test_to_float_shares_nothing_and_keeps_the_flag(qat_qconfig: Any) -> None:
    """PyTorch's result shares the weight, and is in training mode."""
    ours, _, _ = _pair("Conv2d", qat_qconfig)
    plain = ours.eval().to_float()
    assert not plain.training
    plain.weight.data.zero_()
    assert ours.weight.any()


def test_from_float_shares_parameters_and_keeps_the_flag(qat_qconfig: Any) -> None:
    conv = nn.Conv2d(1, 1, 1).eval()
    conv.qconfig = qat_qconfig
    ours = qat.Conv2d.from_float(conv)
    assert ours.weight is conv.weight and ours.bias is conv.bias
    assert not ours.training


def test_parametrizations_come_along(qat_qconfig: Any) -> None:
    class Doubled(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return 2 * weight

    conv = nn.Conv2d(1, 1, 1)
    conv.qconfig = qat_qconfig
    parametrize.register_parametrization(conv, "weight", Doubled())
    ours = qat.Conv2d.from_float(conv)
    assert parametrize.is_parametrized(ours, "weight")
    assert torch.equal(ours.weight, conv.weight)
    assert torch.equal(ours.to_float().weight, conv.weight)


def test_refusals(qat_qconfig: Any) -> None:
    conv = nn.Conv2d(1, 1, 1)
    with pytest.raises(ConfigError, match="the Conv2d to train has no qconfig"):
        qat.Conv2d.from_float(conv)
    conv.qconfig = qat_qconfig
    with pytest.raises(ConfigError, match=r"takes a torch.nn.modules.conv.Conv1d, got .*Conv2d"):
        qat.Conv1d.from_float(conv)
    with pytest.raises(ConfigError, match="needs a QConfig whose weight"):
        qat.Conv2d(1, 1, 1)
