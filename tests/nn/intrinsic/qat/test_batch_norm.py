"""The training of a batch norm with its root: what the formula promises."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from backquant.nn import intrinsic
from backquant.nn.intrinsic import qat
from backquant.nn.intrinsic.qat.batch_norm import freeze_bn_stats, update_bn_stats


def _module() -> tuple[nn.Module, qat.ConvBn2d]:
    block = intrinsic.ConvBn2d(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    nn.init.uniform_(block[1].weight, 0.5, 2)
    block.qconfig = SimpleNamespace(weight=nn.Identity)
    return block, qat.ConvBn2d.from_float(block)


def test_without_rounding_it_is_the_float_block() -> None:
    """With the identity for a fake quantize, steps 1 to 3 are convolution and batch norm."""
    x = torch.randn(5, 3, 8, 8)
    for training in (True, False):
        block, module = _module()
        statistics = block[1].running_mean.clone()
        expected = block.train(training)(x)
        block[1].running_mean.copy_(statistics)
        torch.testing.assert_close(module.train(training)(x), expected, atol=1e-5, rtol=1e-4)


def test_folded_it_equals_its_eval_mode() -> None:
    _, module = _module()
    for _ in range(3):
        module(torch.randn(5, 3, 8, 8))
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(module.eval().to_float()(x), module(x), atol=1e-5, rtol=1e-4)


def test_resets() -> None:
    _, module = _module()
    module(torch.randn(5, 3, 8, 8))
    module.reset_running_stats()
    assert not module.bn.running_mean.any()
    module.reset_bn_parameters()
    assert not module.bn.bias.any()
    assert bool((module.bn.weight < 1).all())


def test_other_modules_are_passed_over() -> None:
    bn = nn.BatchNorm2d(2)
    freeze_bn_stats(bn)
    assert bn.training
    update_bn_stats(bn.eval())
    assert not bn.training
