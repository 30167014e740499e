"""``nn.SyncBatchNorm`` before or after prepare: the same structure, the same model converted.

Among several ranks it trains on a GPU only; here are structure, evaluation, and training alone.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import backquant
from backquant.nn.intrinsic import qat as nniqat

CONVERTED = nn.SyncBatchNorm.convert_sync_batchnorm
NAMES = ["residual", "signal", "volume", "perceptron", "decoder2d"]


def _settled(model, shape):
    for _ in range(3):
        model(torch.randn(shape))
    return model


def _norms(model):
    return sorted({type(m).__name__ for m in model.modules() if "BatchNorm" in type(m).__name__})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_same_as_the_plain_batch_norm(qat, name, when):
    model, shape = qat.model(name)
    x = torch.randn(shape)
    _settled(model, shape)
    plain = qat.ours(model, x)
    converted_before = qat.ours(CONVERTED(copy.deepcopy(model)), x)
    sync = converted_before if when == "before" else CONVERTED(qat.ours(model, x))
    assert sync.code == plain.code
    assert _norms(sync) == ["SyncBatchNorm"]
    fused = [m for m in sync.modules() if hasattr(m, "freeze_bn_stats")]
    assert fused and all(type(m.bn) is nn.SyncBatchNorm for m in fused)
    assert sync.state_dict().keys() == plain.state_dict().keys()
    plain.eval(), sync.eval()
    assert torch.equal(sync(x), plain(x))
    expected = backquant.convert_to_reference_fx(plain)
    converted = backquant.convert_to_reference_fx(sync)
    assert _norms(converted) == _norms(expected) == []
    assert converted.code == expected.code
    assert torch.equal(converted(x), expected(x))
    assert torch.equal(backquant.convert_fx(sync)(x), backquant.convert_fx(plain)(x))


def test_it_is_the_module_of_the_user(qat):
    """Process group, momentum and the rest stay; parameters and buffers are copies."""
    group = object()
    sync = nn.SyncBatchNorm(4, eps=0.25, momentum=0.5)
    sync.process_group = group
    prepared = qat.ours(nn.Sequential(nn.Conv2d(3, 4, 1), sync), torch.randn(2, 3, 4, 4))
    trained = prepared.get_submodule("0").bn
    assert type(trained) is nn.SyncBatchNorm
    assert trained.process_group is group
    assert (trained.eps, trained.momentum) == (0.25, 0.5)
    assert trained.weight is not sync.weight


@pytest.mark.parametrize("name", NAMES)
def test_training_alone_is_that_of_the_plain_batch_norm(qat, name):
    model, shape = qat.model(name)
    x = torch.randn(shape)
    plain, sync = qat.ours(model, x), qat.ours(CONVERTED(copy.deepcopy(model)), x)
    qat.train_both(sync, plain, shape, steps=5)


def test_freezing_and_unfreezing(qat):
    model, shape = qat.model("residual")
    prepared = qat.ours(CONVERTED(model), torch.randn(shape))
    prepared.apply(nniqat.freeze_bn_stats).train()
    assert not prepared.get_submodule("stem.0").bn.training
    prepared(torch.randn(shape))
    prepared.apply(nniqat.update_bn_stats).train()
    assert prepared.get_submodule("stem.0").bn.training


class Alone(nn.Module):
    """Batch norms that no convolution takes: behind one that is used twice, and behind a sine."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.first = nn.SyncBatchNorm(4)
        self.second = nn.SyncBatchNorm(4)

    def forward(self, x):
        x = self.conv(x)
        return self.first(x) + self.second(torch.sin(x))


@pytest.mark.parametrize("when", ["before", "after"])
def test_unfused_ones_survive(qat, when):
    shape = (2, 3, 4, 4)
    model = Alone()
    if when == "after":
        model.first, model.second = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    prepared = qat.ours(model, torch.randn(shape))
    prepared = CONVERTED(prepared) if when == "after" else prepared
    assert type(prepared.get_submodule("first")) is nn.SyncBatchNorm
    assert type(prepared.get_submodule("second")) is nn.SyncBatchNorm
    prepared.eval()
    for _ in range(40):
        x = torch.randn(shape)
        expected = prepared(x)
    converted = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
    assert (converted(x) - expected).abs().max() < 0.2
    assert type(converted.get_submodule("first")) is nn.BatchNorm2d
    lowered = backquant.convert_fx(prepared)
    assert (lowered(x) - converted(x)).abs().max() < 0.1


def test_calibration_folds_it(qat):
    model, shape = qat.model("residual")
    plain = _settled(model, shape).eval()
    sync = CONVERTED(copy.deepcopy(model)).eval()
    x = torch.randn(shape)
    mapping = backquant.get_default_qconfig_mapping("x86")
    made = []
    for each in (plain, sync):
        prepared = backquant.prepare_fx(each, mapping, x)
        prepared(x)
        made.append(backquant.convert_fx(prepared)(x))
        quantized = backquant.quantize(each, backend="x86", calibration=[x])
        assert _norms(prepared) == _norms(quantized) == []
    assert torch.equal(*made)
