"""``fuse_fx`` in training mode, where PyTorch's public function raises."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_fx
from torch.ao.quantization.backend_config import get_native_backend_config
from torch.ao.quantization.fx.fuse import fuse

import backquant


@pytest.mark.parametrize("name", ["residual", "signal", "volume", "perceptron", "decoder2d"])
def test_as_pytorchs_inner_function(qat, name):
    model, _ = qat.model(name)
    ours = backquant.fuse_fx(model)
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    theirs = fuse(traced, True, None, get_native_backend_config())
    assert ours.code == theirs.code
    kinds = [{n: type(m).__name__ for n, m in each.named_modules()} for each in (ours, theirs)]
    for each in kinds:
        each.pop("")
    assert kinds[0] == kinds[1]
    assert all(module.training for module in ours.modules())


@pytest.mark.parametrize("name", ["residual", "signal", "volume", "perceptron"])
def test_it_computes_what_the_model_computes(qat, name, unchanged):
    model, shape = qat.model(name)
    reference, x = copy.deepcopy(model), torch.randn(shape)
    with unchanged(model):
        fused = backquant.fuse_fx(model)
        for each in (fused, reference):
            torch.manual_seed(0)
            each.result = each(x)
            each.result.sum().backward()
    assert torch.equal(fused.result, reference.result)
    gradients = sorted(float(p.grad.double().sum()) for p in fused.parameters())
    expected = sorted(float(p.grad.double().sum()) for p in reference.parameters())
    assert gradients == pytest.approx(expected)


def test_torch_refuses():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    with pytest.raises(AssertionError, match="only for eval"):
        quantize_fx.fuse_fx(model)


def test_evaluation_mode_folds(qat):
    model, _ = qat.model("residual")
    fused = backquant.fuse_fx(model.eval())
    assert not [m for m in fused.modules() if "BatchNorm" in type(m).__name__]


def test_a_batch_norm_without_module_for_training_stays(qat):
    model = nn.Sequential(nn.ConvTranspose2d(3, 3, 1), nn.BatchNorm2d(3))
    fused = backquant.fuse_fx(model)
    assert [type(m) for m in fused.children()] == [nn.ConvTranspose2d, nn.BatchNorm2d]


def test_sync_batch_norm_is_fused_and_kept():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.SyncBatchNorm(3), nn.ReLU())
    [fused] = backquant.fuse_fx(model).children()
    assert type(fused).__name__ == "ConvBnReLU2d"
    assert type(fused[1]) is nn.SyncBatchNorm


def test_preserved_attributes():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model.classes = ["cat", "dog"]
    custom = backquant.FuseCustomConfig().set_preserved_attributes(["classes"])
    assert backquant.fuse_fx(model, custom).classes == ["cat", "dog"]
