"""Linear modules in training against ``torch.ao.nn.intrinsic.qat``."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic.qat as oracle
from torch import nn
from torch.ao.quantization import disable_observer

from backquant.errors import ConfigError, InputError
from backquant.nn import intrinsic
from backquant.nn.intrinsic import qat


def parts_of(name: str, bias: bool = True) -> list[nn.Module]:
    linear = nn.Linear(5, 6, bias=bias)
    if name == "LinearReLU":
        return [linear, nn.ReLU()]
    bn = nn.BatchNorm1d(6, eps=1e-3, momentum=0.2)
    nn.init.normal_(bn.weight)
    return [linear, bn]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["LinearReLU", "LinearBn1d"])
def test_training_is_bit_equal(
    name: str, bias: bool, pair: Any, qat_qconfig: Any, train_side_by_side: Any
) -> None:
    def between(step: int, module: nn.Module) -> None:
        if step == 4 and name == "LinearBn1d":
            module.freeze_bn_stats()

    ours, theirs = pair(name, parts_of(name, bias), qat_qconfig)
    train_side_by_side(ours, theirs, (8, 5), between=between)
    x = torch.randn(8, 5)
    assert torch.equal(ours.eval()(x), theirs.eval()(x))
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    one, two = ours.to_float(), theirs.to_float()
    assert type(one).__name__ == type(two).__name__
    assert torch.equal(one(x), two(x))
    assert not one.training
    ours.apply(disable_observer)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(twin(x), ours(x))


def test_freezing_reaches_linear_too(qat_qconfig: Any) -> None:
    """PyTorch's freeze_bn_stats passes over LinearBn1d: a difference on purpose."""
    ours = qat.LinearBn1d(5, 6, qconfig=qat_qconfig)
    theirs = oracle.LinearBn1d(5, 6, qconfig=qat_qconfig)
    ours.apply(qat.freeze_bn_stats)
    theirs.apply(oracle.freeze_bn_stats)
    assert ours.freeze_bn and not theirs.freeze_bn
    ours.apply(qat.update_bn_stats)
    assert not ours.freeze_bn and ours.bn.training


def test_three_dimensions_are_refused(qat_qconfig: Any) -> None:
    """PyTorch trains on them where sizes allow it, and folds along another axis."""
    module = qat.LinearBn1d(5, 6, qconfig=qat_qconfig)
    with pytest.raises(InputError, match=r"takes inputs \(N, 5\), got \(2, 6, 5\)"):
        module(torch.randn(2, 6, 5))


def test_zero_gamma_trains(qat_qconfig: Any) -> None:
    block = intrinsic.LinearBn1d(*parts_of("LinearBn1d"))
    nn.init.zeros_(block[1].weight)
    block.qconfig = qat_qconfig
    y = qat.LinearBn1d.from_float(block)(torch.randn(8, 5))
    assert torch.equal(y, torch.zeros_like(y))


def test_refusals(qat_qconfig: Any) -> None:
    block = intrinsic.LinearBn1d(*parts_of("LinearBn1d"))
    with pytest.raises(ConfigError, match="has no qconfig"):
        qat.LinearBn1d.from_float(block)
    with pytest.raises(ConfigError, match="takes a backquant"):
        qat.LinearReLU.from_float(block)
    assert qat.LinearBn1d(5, 6, freeze_bn=True, qconfig=qat_qconfig).freeze_bn
