"""``fuse_modules`` and ``fuse_modules_qat`` beside those of ``torch.ao``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization as tq

import backquant
from backquant import ConfigError, UsageError
from backquant.api import fuse_modules, fuse_modules_qat


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.up, self.up_bn = nn.ConvTranspose2d(4, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up_bn(self.up(self.relu(self.bn(self.conv(x)))))
        result: torch.Tensor = self.head(x.mean((2, 3)))
        return result


LISTS = [["conv", "bn", "relu"], ["up", "up_bn"], ["head.0", "head.1"], ["head.2", "head.3"]]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    net = Net()
    net(torch.randn(4, 3, 8, 8))  # statistics that are not those of a new batch norm
    return net


def classes(model: nn.Module) -> dict[str, str]:
    return {path: type(module).__name__ for path, module in model.named_modules()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fusing_for_inference_is_that_of_torch(net: Net) -> None:
    net.eval()
    ours, theirs = fuse_modules(net, LISTS), tq.fuse_modules(net, LISTS)
    assert classes(ours) == classes(theirs)
    x = torch.randn(2, 3, 8, 8)
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)
    assert torch.allclose(ours(x), net(x), atol=1e-5)
    assert isinstance(net.bn, nn.BatchNorm2d)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fusing_for_training_is_that_of_torch(net: Net) -> None:
    lists = [LISTS[0], *LISTS[2:]]
    ours, theirs = fuse_modules_qat(net, lists), tq.fuse_modules_qat(net, lists)
    assert classes(ours) == classes(theirs)
    x = torch.randn(2, 3, 8, 8)
    assert torch.allclose(ours(x), theirs(x), atol=1e-6)


def test_a_fused_model_is_prepared_and_converted(net: Net) -> None:
    net.eval()
    x = torch.randn(2, 3, 8, 8)
    mapping = backquant.get_default_qconfig_mapping("x86")
    prepared = backquant.prepare_fx(fuse_modules(net, LISTS[0]), mapping, (x,))
    prepared(x)
    direct = backquant.prepare_fx(net, mapping, (x,))
    direct(x)
    assert torch.equal(backquant.convert_fx(prepared)(x), backquant.convert_fx(direct)(x))


def test_one_list_in_place(net: Net) -> None:
    assert fuse_modules(net.eval(), ["conv", "bn"], inplace=True) is net
    assert type(net.bn) is nn.Identity
    assert not net.bn.training


def test_hooks_move_to_the_fused_module(net: Net) -> None:
    seen: list[str] = []
    net.conv.register_forward_pre_hook(lambda *_: seen.append("before"))
    net.relu.register_forward_hook(lambda *_: seen.append("after"))
    fuse_modules(net.eval(), LISTS[0])(torch.randn(1, 3, 8, 8))
    assert seen == ["before", "after"]
    assert len(net.conv._forward_pre_hooks) == 1


def test_a_fuser_of_ones_own(net: Net) -> None:
    def fuser(is_qat: bool, conv: Any, relu: Any) -> nn.Module:
        return nn.Sequential(conv, relu)

    custom = {"additional_fuser_method_mapping": {(nn.ConvTranspose2d, nn.BatchNorm2d): fuser}}
    fused = fuse_modules(net.eval(), ["up", "up_bn"], fuse_custom_config_dict=custom)
    assert isinstance(fused.up, nn.Sequential)
    mine = fuse_modules(net, ["up", "up_bn"], fuser_func=lambda modules: modules[::-1])
    assert isinstance(mine.up, nn.BatchNorm2d)


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ("fuse-misspelt", ["conv", "nb"]),
        ("fuse-no-pattern", ["relu", "conv"]),
        ("fuse-one", ["conv"]),
        ("fuse-the-model", ["conv", ""]),
    ],
)
def test_what_cannot_be_fused(net: Net, message: str, names: Any, snapshot: Any) -> None:
    with pytest.raises(UsageError) as caught:
        fuse_modules(net.eval(), names)
    snapshot(message, caught.value)


def test_training_mode_cannot_be_folded(net: Net) -> None:
    with pytest.raises(ConfigError):
        fuse_modules(net, ["conv", "bn"])
    assert isinstance(net.bn, nn.BatchNorm2d)


BY_HAND = {
    "paths are those": lambda _, n: fuse_modules(n["net"].eval(), ["conv", "bn"]),
    "fuse_custom_config_dict": lambda _, n: fuse_modules(
        n["net"].eval(),
        ["relu", "conv"],
        fuse_custom_config_dict={
            "additional_fuser_method_mapping": {
                (nn.ReLU, nn.Conv2d): lambda is_qat, *modules: nn.Sequential(*modules)
            }
        },
    ),
}
