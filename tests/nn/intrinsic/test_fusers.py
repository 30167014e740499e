"""Fuser functions against ``torch.ao.quantization.fuser_method_mappings``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import fuser_method_mappings as oracle

from backquant.errors import ConfigError
from backquant.nn.intrinsic import fusers

CONV = [
    (nn.Conv1d, nn.BatchNorm1d, (2, 4, 8)),
    (nn.Conv2d, nn.BatchNorm2d, (2, 4, 6, 6)),
    (nn.Conv3d, nn.BatchNorm3d, (2, 4, 4, 4, 4)),
]


def _norm(cls: Any, channels: int) -> Any:
    bn = cls(channels)
    bn.running_mean.normal_()
    bn.running_var.uniform_(0.2, 3.0)
    nn.init.normal_(bn.weight)
    return bn


def _same(name: str, is_qat: bool, modules: list[nn.Module], x: torch.Tensor) -> None:
    modules = [module.train(is_qat) for module in modules]
    ours = getattr(fusers, name)(is_qat, *modules)
    theirs = getattr(oracle, name)(is_qat, *copy.deepcopy(modules))
    assert type(ours).__name__ == type(theirs).__name__
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize("is_qat", [True, False])
@pytest.mark.parametrize(("conv", "bn", "shape"), CONV)
def test_conv(conv: Any, bn: Any, shape: tuple[int, ...], is_qat: bool) -> None:
    x = torch.randn(shape)
    _same("fuse_conv_bn", is_qat, [conv(4, 6, 2), _norm(bn, 6)], x)
    _same("fuse_conv_bn_relu", is_qat, [conv(4, 6, 2), _norm(bn, 6), nn.ReLU()], x)


@pytest.mark.parametrize("is_qat", [True, False])
def test_linear(is_qat: bool) -> None:
    _same("fuse_linear_bn", is_qat, [nn.Linear(4, 6), _norm(nn.BatchNorm1d, 6)], torch.randn(5, 4))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_transposed(dimensions: int) -> None:
    convt = getattr(nn, f"ConvTranspose{dimensions}d")(4, 6, 2)
    bn = _norm(getattr(nn, f"BatchNorm{dimensions}d"), 6)
    _same("fuse_convtranspose_bn", False, [convt, bn], torch.randn(2, 4, *[4] * dimensions))


def test_linear_without_bias_before_a_norm_of_one_channel_is_refused() -> None:
    """PyTorch makes a linear whose bias has one entry."""
    with pytest.raises(ConfigError, match="6 output channels do not fit a batch norm of 1"):
        fusers.fuse_linear_bn(False, nn.Linear(4, 6, bias=False).eval(), nn.BatchNorm1d(1).eval())


def test_training_keeps_the_modules_themselves() -> None:
    conv, bn = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)
    fused = fusers.fuse_conv_bn(True, conv, bn)
    assert list(fused.children()) == [conv, bn]


def _refusals() -> list[tuple[str, bool, list[nn.Module], str]]:
    conv, bn, relu = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.ReLU()
    off = [copy.deepcopy(module).eval() for module in (conv, bn, relu)]
    convt, lin, bn1 = nn.ConvTranspose2d(1, 2, 1), nn.Linear(1, 2), nn.BatchNorm1d(2)
    bare = nn.BatchNorm2d(2, track_running_stats=False)

    class Mine(nn.Conv2d):
        pass

    mine = Mine(1, 2, 1)
    return [
        ("fuse_conv_bn", False, [conv, off[1]], "some are in training mode"),
        ("fuse_conv_bn_relu", False, [off[0], off[1], relu], "some are in training mode"),
        ("fuse_linear_bn", True, [lin, copy.deepcopy(bn1).eval()], "some are in training mode"),
        ("fuse_convtranspose_bn", False, [convt, off[1]], "some are in training mode"),
        ("fuse_conv_bn", False, [conv, bn], "only in eval mode"),
        ("fuse_conv_bn", True, [conv, bare], "track_running_stats=True"),
        ("fuse_conv_bn_relu", True, [conv, bare, relu], "track_running_stats=True"),
        ("fuse_linear_bn", True, [nn.Linear(1, 3), bn1], "3 output channels do not fit"),
        ("fuse_convtranspose_bn", True, [convt, bn], "no QAT module exists"),
        ("fuse_conv_bn", True, [mine, bn], "no fused module exists for Mine, BatchNorm2d"),
        ("fuse_conv_bn_relu", True, [mine, bn, relu], "no fused module exists"),
        (
            "fuse_conv_bn_relu",
            False,
            [copy.deepcopy(mine).eval(), off[1], off[2]],
            "no fused module exists",
        ),
    ]


@pytest.mark.parametrize(("name", "is_qat", "modules", "message"), _refusals())
def test_refusals(name: str, is_qat: bool, modules: list[nn.Module], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        getattr(fusers, name)(is_qat, *modules)
    assert error.value.where and error.value.fix
