"""Fusion keeps what is computed, names the culprit when it cannot, and touches no original."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.ao.quantization.quantize_fx as torch_fx
import torch.nn.functional as F
from torch import nn
from torch.ao.quantization.backend_config import get_onednn_backend_config

from backquant.backend_config import BackendConfig, BackendPatternConfig, MatchAllNode
from backquant.backend_config import get_backend_config as get_backend
from backquant.errors import ConfigError
from backquant.fuse import Fused, apply_fusion
from backquant.graph import capture
from backquant.match import plan_fusion


def fuse(model: nn.Module, backend: BackendConfig | None = None, is_qat: bool = False) -> Fused:
    backend = backend or get_backend("x86")
    captured = capture(model)
    fusions = plan_fusion(captured.module, backend, is_qat=is_qat)
    return apply_fusion(captured.module, captured.scopes, fusions, backend, is_qat=is_qat)


def names_of(fused: Fused) -> list[str]:
    return [node.name for node in fused.module.graph.nodes]


def types_of(fused: Fused) -> dict[str, str]:
    modules = dict(fused.module.named_modules(remove_duplicate=False))
    return {
        node.target: type(modules[node.target]).__name__
        for node in fused.module.graph.nodes
        if node.op == "call_module"
    }


@pytest.mark.parametrize("backend", ["x86", "native", "qnnpack", "onednn", "tensorrt"])
def test_outputs_stay(mixed: nn.Module, backend: str) -> None:
    x = torch.randn(2, 2, 6, 6)
    fused = fuse(mixed, get_backend(backend))
    torch.testing.assert_close(fused.module(x), mixed(x), atol=1e-5, rtol=1e-5)


def test_before_and_after(mixed: nn.Module) -> None:
    fused = fuse(mixed)
    assert names_of(fused) == [
        "x", "block_0", "conv", "shift", "add", "tail", "alone", "mean", "head_0", "output",
    ]  # fmt: skip
    assert types_of(fused) == {
        "block.0": "ConvReLU2d",
        "conv": "Conv2d",
        "tail": "ConvReLU2d",
        "alone": "BatchNorm2d",
        "head.0": "LinearReLU",
    }
    assert fused.provenance.to_dict() == {
        "block_0": ["block_0", "block_1", "block_2"],
        "conv": ["conv", "bn"],
        "tail": ["tail", "relu"],
        "head_0": ["head_0", "head_1"],
    }
    assert fused.scopes["block_0"].path == "block.0"
    assert fused.scopes["block_2"].path == "block.2"


def test_training_keeps_the_batch_norm(mixed: nn.Module) -> None:
    fused = fuse(mixed.train(), is_qat=True)
    assert types_of(fused)["block.0"] == "ConvBnReLU2d"
    assert types_of(fused)["conv"] == "ConvBn2d"
    assert all(module.training for module in fused.module.modules())


def test_originals_stay(mixed: nn.Module) -> None:
    before = copy.deepcopy(mixed.state_dict())
    structure = repr(mixed)
    captured = capture(mixed)
    code = captured.module.code
    backend = get_backend("x86")
    fusions = plan_fusion(captured.module, backend)
    for _ in range(2):  # the captured graph can be fused again
        apply_fusion(captured.module, captured.scopes, fusions, backend, is_qat=False)
    assert captured.module.code == code
    assert repr(mixed) == structure
    assert list(mixed.state_dict()) == list(before)
    for name, value in mixed.state_dict().items():
        assert torch.equal(value, before[name])


class Shared(nn.Module):
    """One convolution: with one batch norm, with another, and bare."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        self.bn1 = nn.BatchNorm2d(2)
        self.bn2 = nn.BatchNorm2d(2)
        self.relu = nn.ReLU()

    def forward(self, x):
        a = self.relu(self.bn1(self.conv(x)))
        b = self.relu(self.bn2(self.conv(a)))
        c = self.relu(self.bn1(self.conv(b)))
        return c + torch.sigmoid(self.conv(c))


def test_calls_that_differ_get_modules_of_their_own(settled: Any) -> None:
    model = settled(Shared())
    fused = fuse(model)
    targets = [n.target for n in fused.module.graph.nodes if n.op == "call_module"]
    assert targets == ["conv_1", "conv_2", "conv_1", "conv"]
    x = torch.randn(1, 2, 3, 3)
    torch.testing.assert_close(fused.module(x), model(x), atol=1e-5, rtol=1e-5)


def test_calls_that_agree_share_the_module(settled: Any) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)
            self.relu = nn.ReLU()

        def forward(self, x):
            return self.relu(self.fc(self.relu(self.fc(x))))

    fused = fuse(settled(Twice()))
    assert [n.target for n in fused.module.graph.nodes if n.op == "call_module"] == ["fc", "fc"]


def test_reads_of_a_fused_modules_weight_stay_unfolded(settled: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)
            self.bn = nn.BatchNorm2d(2)

        def forward(self, x):
            return F.conv2d(self.bn(self.conv(x)), self.conv.weight)

    model = settled(Tied())
    fused = fuse(model)
    assert [n.target for n in fused.module.graph.nodes if n.op == "get_attr"] == ["conv_weight"]
    x = torch.randn(1, 2, 3, 3)
    torch.testing.assert_close(fused.module(x), model(x), atol=1e-5, rtol=1e-5)


class Sum(nn.Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        self.kwargs = kwargs

    def forward(self, x):
        return torch.add(self.conv(x), x, **self.kwargs)


def test_arguments_that_would_be_lost_prevent_fusion(settled: Any) -> None:
    backend = get_backend("onednn")
    assert "conv" in names_of(fuse(settled(Sum()), backend))
    assert "add" not in names_of(fuse(settled(Sum()), backend))
    model = settled(Sum(alpha=2))
    fused = fuse(model, backend)
    assert "add" in names_of(fused)
    x = torch.randn(1, 2, 3, 3)
    assert torch.equal(fused.module(x), model(x))


def test_extra_inputs_are_appended(settled: Any) -> None:
    model = settled(Sum())
    fused = fuse(model, get_backend("onednn"))
    (conv,) = (node for node in fused.module.graph.nodes if node.name == "conv")
    assert [str(argument) for argument in conv.args] == ["x", "x"]
    x = torch.randn(1, 2, 3, 3)
    torch.testing.assert_close(fused.module(x), model(x))


def test_an_input_computed_inside_is_no_fusion(settled: Any) -> None:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)

        def forward(self, x):
            y = self.conv(x)
            return torch.add(y, y)

    assert "add" in names_of(fuse(settled(Double()), get_backend("onednn")))


def test_a_constant_is_no_extra_input(settled: Any) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)
            self.bn = nn.BatchNorm2d(2)

        def forward(self, x):
            return self.bn(self.conv(x)) + 1

    assert names_of(fuse(settled(Shifted()), get_backend("onednn"))) == [
        "x", "conv", "add", "output",
    ]  # fmt: skip


def entry_with(fuser: Any) -> BackendConfig:
    entry = BackendPatternConfig((nn.Linear, nn.ReLU)).set_fuser_method(fuser)
    return BackendConfig("mine").set_backend_pattern_config(entry)


@pytest.mark.parametrize(
    ("fuser", "message"),
    [
        (lambda is_qat, linear, relu: None, "returned None"),
        (lambda is_qat, linear, relu: 1 / 0, "ZeroDivisionError"),
        (lambda is_qat, linear: linear, "TypeError"),
    ],
)
def test_bad_fuser_is_named(fuser: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(ConfigError, match=message) as caught:
        fuse(model, entry_with(fuser))
    assert caught.value.where == "mine, entry 0 (Linear, ReLU), node '_0'"
    assert "set_fuser_method" in caught.value.fix


def test_errors_of_our_fusers_keep_their_fix() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)).train()
    model[0].eval()
    with pytest.raises(ConfigError, match="mode") as caught:
        fuse(model)
    assert "x86, entry" in caught.value.where


def test_reversed_fuser_gets_nested_modules() -> None:
    seen: list[Any] = []

    def fuser(is_qat: bool, add: Any, extra: Any, bn_conv: Any) -> nn.Module:
        seen.extend((is_qat, add, extra, *bn_conv))
        return bn_conv[1]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 1, 1)
            self.bn = nn.BatchNorm2d(1)

        def forward(self, x):
            return torch.add(x, self.bn(self.conv(x)))

    entry = (
        BackendPatternConfig()
        ._set_pattern_complex_format((torch.add, MatchAllNode, (nn.BatchNorm2d, nn.Conv2d)))
        .set_fuser_method(fuser)
        ._set_root_node_getter(lambda pattern: pattern[2][1])
        ._set_extra_inputs_getter(lambda pattern: [pattern[1]])
    )
    backend = BackendConfig("mine").set_backend_pattern_config(entry)
    fused = fuse(Net().eval(), backend)
    assert seen[:3] == [False, torch.add, MatchAllNode]
    assert [type(module) for module in seen[3:]] == [nn.BatchNorm2d, nn.Conv2d]
    assert names_of(fused) == ["x", "conv", "output"]


@pytest.mark.parametrize(
    ("getter", "message"),
    [(lambda pattern: [7], "no node"), (lambda pattern: [pattern[0]], "inside of it")],
)
def test_bad_extra_inputs_are_named(getter: Any, message: str) -> None:
    entry = (
        BackendPatternConfig((nn.Linear, nn.ReLU))
        .set_fuser_method(lambda is_qat, linear, relu: linear)
        ._set_extra_inputs_getter(getter)
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(ConfigError, match=message):
        fuse(model, BackendConfig("mine").set_backend_pattern_config(entry))


def test_root_that_is_no_module() -> None:
    class Net(nn.Module):
        def forward(self, x):
            return torch.relu(torch.add(x, x))

    entry = BackendPatternConfig((torch.add, torch.relu))
    entry.set_fuser_method(lambda is_qat, add, relu: nn.ReLU())
    with pytest.raises(ConfigError, match="has to be a module"):
        fuse(Net(), BackendConfig("mine").set_backend_pattern_config(entry))


def test_preserved_attributes_stay(mixed: nn.Module) -> None:
    mixed.vocabulary = ["a"]
    captured = capture(mixed, preserved_attributes=["vocabulary"])
    backend = get_backend("x86")
    fusions = plan_fusion(captured.module, backend)
    fused = apply_fusion(captured.module, captured.scopes, fusions, backend, is_qat=False)
    assert copy.deepcopy(fused.module).vocabulary == ["a"]


def test_longest_pattern_wins_then_the_earlier_registered(settled: Any) -> None:
    chosen: list[str] = []

    def remember(name: str) -> Any:
        def fuser(is_qat: bool, *modules: nn.Module) -> nn.Module:
            chosen.append(name)
            return modules[0]

        return fuser

    backend = BackendConfig("mine")
    for name, pattern in {
        "short": (nn.BatchNorm1d, nn.ReLU),
        "long": (nn.Linear, nn.BatchNorm1d, nn.ReLU),
        "pair": (nn.Linear, nn.BatchNorm1d),
    }.items():
        entry = BackendPatternConfig(pattern).set_fuser_method(remember(name))
        if name == "short":
            entry._set_root_node_getter(lambda p: p[1])
        backend.set_backend_pattern_config(entry)
    model = nn.Sequential(
        nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU(), nn.BatchNorm1d(2), nn.ReLU()
    )
    fuse(settled(model), backend)
    assert chosen == ["long", "short"]


def test_training_leaves_what_no_fuser_can_train(settled: Any) -> None:
    """PyTorch's onednn fusers raise on convolution + batch norm + add in training."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 1)
            self.bn = nn.BatchNorm2d(2)

        def forward(self, x):
            return torch.add(self.bn(self.conv(x)), x)

    fused = fuse(settled(Block()).train(), get_backend("onednn"), is_qat=True)
    assert types_of(fused) == {"conv": "ConvBn2d"}
    assert "add" in names_of(fused)


class Twice(nn.Module):
    """One layer, called twice."""

    def __init__(self, layer: nn.Module, call: Any) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.layer, self.call(self.layer, x))


@pytest.mark.parametrize(
    ("layer", "call", "fused_class"),
    [
        # what is added is an argument of the call, not a part of the fused module
        (nn.Conv2d(2, 2, 1), lambda m, x: m(x) + x, "ConvAdd2d"),
        (nn.Linear(2, 2), lambda m, x: F.relu(m(x)), "LinearReLU"),
        (nn.Linear(2, 2), lambda m, x: F.leaky_relu(m(x)), "LinearLeakyReLU"),
    ],
    ids=["sum", "relu", "leaky relu"],
)
def test_calls_fused_alike_share_one_module(layer: nn.Module, call: Any, fused_class: str) -> None:
    model = Twice(layer, call).eval()
    fused = fuse(model, get_backend("onednn"))
    assert types_of(fused) == {"layer": fused_class}
    x = torch.randn(3, 2, 2, 2)
    torch.testing.assert_close(fused.module(x), model(x))


def test_calls_fused_differently_have_modules_of_their_own() -> None:
    """In PyTorch both calls compute what one of them was fused with."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(F.relu(self.layer(x)))

    model, x = Model().eval(), torch.randn(3, 2)
    fused = fuse(model, get_backend("onednn"))
    assert types_of(fused) == {"layer": "Linear", "layer_1": "LinearReLU"}
    torch.testing.assert_close(fused.module(x), model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = torch_fx.fuse_fx(copy.deepcopy(model), backend_config=get_onednn_backend_config())
    assert not torch.allclose(theirs(x), model(x))
