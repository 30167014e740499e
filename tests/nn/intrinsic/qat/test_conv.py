"""Convolutions in training against ``torch.ao.nn.intrinsic.qat``."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.ao.nn.intrinsic.qat as oracle
from torch import nn
from torch.ao.quantization import disable_observer

from backquant.errors import ConfigError
from backquant.nn import intrinsic
from backquant.nn.intrinsic import qat

NAMES = [f"{kind}{d}d" for kind in ("ConvBn", "ConvBnReLU", "ConvReLU") for d in (1, 2, 3)]
WITH_NORM = [name for name in NAMES if "Bn" in name]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bias": False, "stride": 2, "groups": 2},
    {"padding": 2, "dilation": 2},
    {"padding": 1, "padding_mode": "reflect"},
]


def parts_of(name: str, **options: Any) -> list[nn.Module]:
    dimensions = int(name[-2])
    conv = getattr(nn, f"Conv{dimensions}d")(4, 6, 3, **options)
    bn = getattr(nn, f"BatchNorm{dimensions}d")(6, eps=1e-3, momentum=0.2)
    nn.init.normal_(bn.weight)
    return [conv, *([bn] if "Bn" in name else []), *([nn.ReLU()] if "ReLU" in name else [])]


def shape_of(name: str) -> tuple[int, ...]:
    return (3, 4, *[7] * int(name[-2]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", OPTIONS)
def test_training_is_bit_equal(
    name: str, options: dict[str, Any], pair: Any, qat_qconfig: Any, train_side_by_side: Any
) -> None:
    if name[-2] == "3" and "padding_mode" in options:
        options = {"padding": 1, "padding_mode": "circular"}
    ours, theirs = pair(name, parts_of(name, **options), qat_qconfig)
    train_side_by_side(ours, theirs, shape_of(name))
    x = torch.randn(shape_of(name))
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize("name", WITH_NORM)
def test_freezing_and_unfreezing(
    name: str, pair: Any, qat_qconfig: Any, train_side_by_side: Any
) -> None:
    def between(step: int, module: nn.Module) -> None:
        if step == 2:
            module.apply(qat.freeze_bn_stats)
            module.apply(oracle.freeze_bn_stats)
        if step in (3, 4):  # train() does not wake a frozen batch norm
            module.train()
        if step == 5:
            module.apply(qat.update_bn_stats)
            module.apply(oracle.update_bn_stats)

    ours, theirs = pair(name, parts_of(name), qat_qconfig)
    train_side_by_side(ours, theirs, shape_of(name), between=between)


def test_a_frozen_batch_norm_keeps_its_statistics(qat_qconfig: Any) -> None:
    block = intrinsic.ConvBn2d(*parts_of("ConvBn2d"))
    block.qconfig = qat_qconfig
    module = qat.ConvBn2d.from_float(block).freeze_bn_stats()
    before = module.bn.running_mean.clone()
    module.train()(torch.randn(3, 4, 7, 7))
    assert module.training and not module.bn.training
    assert torch.equal(module.bn.running_mean, before)
    module.eval().update_bn_stats()
    module.train()(torch.randn(3, 4, 7, 7))
    assert not torch.equal(module.bn.running_mean, before)


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_loads_both_ways(name: str, pair: Any, qat_qconfig: Any) -> None:
    ours, theirs = pair(name, parts_of(name), qat_qconfig)
    other, _ = pair(name, parts_of(name), qat_qconfig)
    x = torch.randn(shape_of(name))
    other(x)
    for module in (ours, theirs, other):
        module.apply(disable_observer)  # so that a forward does not change the qparams
    theirs.load_state_dict(other.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert torch.equal(ours.eval()(x), theirs.eval()(x))
    assert torch.equal(ours(x), other.eval()(x))


@pytest.mark.parametrize("name", NAMES)
def test_to_float_is_bit_equal(name: str, pair: Any, qat_qconfig: Any) -> None:
    ours, theirs = pair(name, parts_of(name), qat_qconfig)
    for _ in range(3):
        x = torch.randn(shape_of(name))
        ours(x), theirs(x)
    one, two = ours.eval().to_float(), theirs.eval().to_float()
    assert type(one).__name__ == type(two).__name__
    assert not one.training
    assert list(one.state_dict()) == list(two.state_dict())
    assert torch.equal(one(x), two.eval()(x))
    before = ours.weight.clone()
    for parameter in one.parameters():
        parameter.data.zero_()
    assert torch.equal(ours.weight, before)


@pytest.mark.parametrize("name", NAMES)
def test_padding_by_name(name: str, qat_qconfig: Any) -> None:
    """PyTorch's ConvBn modules take ``padding="same"`` for four numbers."""
    outputs = []
    for padding in ("same", 2):
        torch.manual_seed(3)
        arguments: dict[str, Any] = {"padding": padding, "dilation": 2, "qconfig": qat_qconfig}
        outputs.append(getattr(qat, name)(4, 6, 3, **arguments)(torch.ones(shape_of(name))))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", NAMES)
def test_constructor_and_copies(name: str, qat_qconfig: Any) -> None:
    arguments: dict[str, Any] = {"stride": 2, "padding": 1, "bias": True, "qconfig": qat_qconfig}
    torch.manual_seed(7)
    ours = getattr(qat, name)(4, 6, 3, **arguments)
    torch.manual_seed(7)
    theirs = getattr(oracle, name)(4, 6, 3, **arguments)
    x = torch.randn(shape_of(name))
    assert torch.equal(ours(x), theirs(x))
    ours.eval().apply(disable_observer)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(twin) is type(ours)
        assert torch.equal(twin(x), ours(x))


@pytest.mark.parametrize("name", ["ConvBn2d", "ConvBnReLU2d"])
def test_zero_gamma_trains(name: str, pair: Any, qat_qconfig: Any) -> None:
    """PyTorch's modules divide by it and return NaN: a difference on purpose."""
    parts = parts_of(name)
    nn.init.zeros_(parts[1].weight)
    ours, theirs = pair(name, parts, qat_qconfig)
    x = torch.randn(shape_of(name))
    assert theirs(x).isnan().any()
    y = ours(x)
    assert torch.equal(y, torch.zeros_like(y))
    (ours(x) - 1).square().sum().backward()
    assert torch.isfinite(ours.bn.weight.grad).all()
    if name == "ConvBn2d":
        float_conv, float_bn = parts[0], parts[1]
        float_bn.zero_grad()
        (float_bn(float_conv(x)) - 1).square().sum().backward()
        torch.testing.assert_close(ours.bn.weight.grad, float_bn.weight.grad, rtol=0.05, atol=0.5)


def test_parameters_are_shared_and_flags_are_not(qat_qconfig: Any) -> None:
    conv, bn = parts_of("ConvBn2d")
    block = intrinsic.ConvBn2d(conv, bn)
    block.qconfig = qat_qconfig
    module = qat.ConvBn2d.from_float(block)
    assert module.weight is conv.weight
    assert module.bn.weight is bn.weight
    module.freeze_bn_stats()
    assert bn.training
    assert not qat.ConvBn2d.from_float(block.eval()).training


def test_sync_batch_norm_takes_the_place_of_the_batch_norm(qat_qconfig: Any) -> None:
    block = intrinsic.ConvBn2d(*parts_of("ConvBn2d"))
    block.qconfig = qat_qconfig
    module = qat.ConvBn2d.from_float(block)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(module)).eval()
    assert isinstance(synced.bn, nn.SyncBatchNorm)
    x = torch.randn(3, 4, 7, 7)
    assert torch.equal(synced(x), module.eval()(x))
    assert torch.equal(synced.to_float().weight, module.to_float().weight)


def test_refusals(qat_qconfig: Any) -> None:
    block = intrinsic.ConvBn2d(*parts_of("ConvBn2d"))
    with pytest.raises(ConfigError, match="the ConvBn2d to train has no qconfig"):
        qat.ConvBn2d.from_float(block)
    block.qconfig = qat_qconfig
    with pytest.raises(ConfigError, match=r"takes a backquant.nn.intrinsic.fused.ConvBnReLU2d"):
        qat.ConvBnReLU2d.from_float(block)
    with pytest.raises(ConfigError, match="needs a QConfig"):
        qat.ConvBn2d(1, 1, 1)
    bad = intrinsic.ConvBn2d(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, track_running_stats=False))
    bad.qconfig = qat_qconfig
    with pytest.raises(ConfigError, match="track_running_stats=True"):
        qat.ConvBn2d.from_float(bad)


@pytest.mark.parametrize("name", ["ConvBnReLU2d", "ConvReLU2d"])
def test_is_a_qat_module_and_a_fused_one(name: str, qat_qconfig: Any) -> None:
    module = getattr(qat, name)(1, 1, 1, qconfig=qat_qconfig)
    assert isinstance(module, nn.Conv2d) and isinstance(module, intrinsic.FusedModule)
