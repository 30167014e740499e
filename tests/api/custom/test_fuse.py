"""``fuse_fx`` in both modes, against PyTorch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao.quantization import quantize_fx as torch_fx
from torch.ao.quantization.backend_config import native as torch_native
from torch.ao.quantization.fx.custom_config import FuseCustomConfig as TorchFuse

import backquant as bq
from backquant.errors import ConfigError, UsageError


class Model(nn.Module):
    def __init__(self, relu: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU() if relu else nn.Identity()
        self.fc = nn.Linear(4, 4)
        self.bn1d = nn.BatchNorm1d(4)
        self.act = nn.ReLU()
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        x = self.relu(self.bn(self.conv(x))).mean([2, 3])
        return self.last(self.act(self.bn1d(self.fc(x))))


def settled(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model


def kinds(module: nn.Module) -> dict[str, str]:
    found = module.named_modules()
    return {name: type(part).__name__ for name, part in found if name and not list(part.children())}


def graph(module: Any) -> list[tuple[str, str, str]]:
    return [(node.name, node.op, str(node.target)) for node in module.graph.nodes]


def test_evaluation_is_torchs() -> None:
    model, x = settled(Model()).eval(), torch.randn(2, 3, 4, 4)
    ours = bq.fuse_fx(model, backend_config=bq.backend_config.get_native_backend_config())
    theirs = torch_fx.fuse_fx(
        copy.deepcopy(model), backend_config=torch_native.get_native_backend_config()
    )
    assert graph(ours) == graph(theirs)
    assert kinds(ours) == kinds(theirs)
    assert torch.equal(ours(x), theirs(x))
    assert torch.allclose(ours(x), model(x), atol=1e-5)


def test_training_keeps_the_batch_norms(unchanged: Any) -> None:
    """In PyTorch, ``fuse_fx`` of a training model raises; training-time fusion is ``prepare_qat_fx``'s."""
    model, x = settled(Model()).train(), torch.randn(2, 3, 4, 4)
    with pytest.raises(AssertionError, match="Fusion only for eval"):
        torch_fx.fuse_fx(copy.deepcopy(model))
    with unchanged(model):
        fused = bq.fuse_fx(model)
    assert [type(m).__name__ for m in fused.children()] == [
        "ConvBnReLU2d",
        "LinearBn1d",
        "ReLU",
        "Linear",
    ]
    twin = copy.deepcopy(model)
    assert torch.equal(fused(x), twin(x))
    fused(x).sum().backward()
    twin(x).sum().backward()
    assert torch.equal(fused.conv[0].weight.grad, twin.conv.weight.grad)
    assert torch.equal(fused.conv[1].running_mean, twin.bn.running_mean)
    assert model.conv.weight.grad is None


def test_training_without_batch_norms_is_torchs() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).train()
    ours, theirs = bq.fuse_fx(model), torch_fx.fuse_fx(copy.deepcopy(model))
    assert kinds(ours) == kinds(theirs)
    assert [type(m).__name__ for m in ours.children()] == ["ConvReLU2d"]
    assert ours.training and theirs.training


def test_what_is_fused_in_training_trains_on_to_the_same_int8_model() -> None:
    """Fusing first, and leaving it to ``prepare_qat_fx``, come to the same."""
    model, x = settled(Model()).train(), torch.randn(8, 3, 4, 4)
    mapping, backend = (
        bq.get_default_qat_qconfig_mapping("x86"),
        bq.backend_config.get_x86_backend_config(),
    )
    plain = bq.prepare_qat_fx(model, mapping, x, backend_config=backend)
    fused = bq.prepare_qat_fx(bq.fuse_fx(model), mapping, x, backend_config=backend)
    assert torch.equal(plain(x), fused(x))


@pytest.mark.parametrize("training", [True, False])
def test_preserved_attributes(training: bool) -> None:
    model = settled(Model()).train(training)
    model.tag = "v1"
    for config in (
        bq.FuseCustomConfig().set_preserved_attributes(["tag"]),
        {"preserved_attributes": ["tag"]},
    ):
        fused = bq.fuse_fx(model, config)
        assert fused.tag == copy.deepcopy(fused).tag == "v1"
    if not training:
        config = TorchFuse().set_preserved_attributes(["tag"])
        assert torch_fx.fuse_fx(copy.deepcopy(model), config).tag == "v1"


def test_refusals(snapshot: Any) -> None:
    model = settled(Model()).eval()
    with pytest.raises(ConfigError, match="no attribute 'tag'"):
        bq.fuse_fx(model, {"preserved_attributes": ["tag"]})
    with pytest.raises(UsageError, match="not a FuseCustomConfig"):
        bq.fuse_fx(model, bq.PrepareCustomConfig())
    model.bn.train()
    with pytest.raises(ConfigError) as caught:
        bq.fuse_fx(model)
    snapshot("fuse-mixed-modes", caught.value)
