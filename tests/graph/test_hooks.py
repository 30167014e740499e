"""Hooks on calls, and forwards assigned to a module, are part of what is quantized."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import backquant


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.relu(self.bn(self.conv(x)))
        return self.fc(x.mean((2, 3)))


def _doubled(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def _doubled_input(module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (args[0] * 2,)


def _behind(net: Net) -> None:
    net.conv.register_forward_hook(_doubled)


def _before(net: Net) -> None:
    net.fc.register_forward_pre_hook(_doubled_input)


def _in_place(net: Net) -> None:
    def double(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.mul_(2)

    net.conv.register_forward_hook(double)


def _with_keywords(net: Net) -> None:
    net.fc.register_forward_hook(lambda module, args, kwargs, out: out + 3, with_kwargs=True)


def _of_a_container(net: Net) -> None:
    net.register_forward_pre_hook(_doubled_input)


def _assigned(net: Net) -> None:
    own = net.conv.forward
    net.conv.forward = lambda x: own(x) * 2  # type: ignore[method-assign]


def _inner(net: Net) -> None:
    own = net.conv._conv_forward
    net.conv._conv_forward = lambda x, weight, bias: own(x, weight * 2, bias)  # type: ignore[method-assign]


def _bound(net: Net) -> None:
    kind = type(net.fc)
    net.fc.forward = MethodType(lambda self, x: kind.forward(self, x) - 3, net.fc)  # type: ignore[method-assign]


CHANGES: list[Callable[[Net], None]] = [
    _behind,
    _before,
    _in_place,
    _with_keywords,
    _of_a_container,
    _assigned,
    _inner,
    _bound,
]


def _noise(wanted: torch.Tensor, got: torch.Tensor) -> float:
    return float((wanted - got).detach().square().sum() / wanted.detach().square().sum())


def _settled(change: Callable[[Net], None]) -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 3, 8, 8)
    net(x)
    change(net.eval())
    return net, x


@pytest.mark.parametrize("change", CHANGES)
def test_what_hooks_and_assigned_forwards_do_is_quantized_with_the_rest(
    change: Callable[[Net], None],
) -> None:
    net, x = _settled(change)
    wanted = net(x)
    quantized = backquant.quantize(net, x, backend="x86", calibration=[x], slower="keep")
    assert quantized.report.coverage == 1.0
    assert _noise(wanted, quantized(x)) < 1e-3
    torch.testing.assert_close(net(x), wanted, rtol=0, atol=0)  # its hooks are still there


@pytest.mark.parametrize("change", [_behind, _before])
def test_each_flow_runs_a_hook_once(change: Callable[[Net], None]) -> None:
    net, x = _settled(change)
    backend, mapping = backquant.get_backend_config("x86"), backquant.default_mapping("x86")
    prepared = backquant.prepare_fx(net, mapping, (x,), backend_config=backend)
    torch.testing.assert_close(prepared(x), net(x))
    assert _noise(net(x), backquant.convert_fx(prepared, backend_config=backend)(x)) < 1e-3


def test_a_hook_that_only_looks_leaves_nothing_in_the_graph(tmp_path: Any) -> None:
    seen = []
    net, x = _settled(lambda net: None)
    net.conv.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    quantized = backquant.quantize(net, x, backend="x86", calibration=[x], slower="keep")
    backquant.save(quantized, tmp_path / "net.bq")  # hooks cannot be stored
    before = len(seen)
    quantized(x)
    assert len(seen) == before


def test_the_hook_of_the_model_makes_its_output() -> None:
    net, x = _settled(lambda net: None)
    net.register_forward_hook(lambda module, args, output: {"logits": output})
    quantized = backquant.quantize(net, x, backend="x86", calibration=[x], slower="keep")
    assert _noise(net(x)["logits"], quantized(x)["logits"]) < 1e-3


def test_a_module_that_stays_whole_keeps_its_hooks() -> None:
    net, x = _settled(_behind)
    custom = backquant.PrepareCustomConfig().set_non_traceable_module_names(["conv"])
    mapping, backend = backquant.default_mapping("x86"), backquant.get_backend_config("x86")
    prepared = backquant.prepare_fx(
        net, mapping, (x,), prepare_custom_config=custom, backend_config=backend
    )
    torch.testing.assert_close(prepared(x), net(x))


def _weight_norm(layer: nn.Module) -> None:
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(layer)


def _pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)
    prune.l1_unstructured(layer, "weight", 0.1)  # twice: one hook holds both


@pytest.mark.parametrize("compute", [_weight_norm, nn.utils.spectral_norm, _pruned])
def test_weights_that_hooks_compute_are_folded(
    compute: Callable[[nn.Module], Any], tmp_path: Any
) -> None:
    def change(net: Net) -> None:
        for layer in (net.conv, net.fc):
            compute(layer)

    net, x = _settled(change)
    names = list(net.state_dict())
    quantized = backquant.quantize(net, x, backend="x86", calibration=[x], slower="keep")
    assert quantized.report.coverage == 1.0
    assert _noise(net(x), quantized(x)) < 1e-3
    assert list(net.state_dict()) == names
    backquant.save(quantized, tmp_path / "net.bq")


def test_weight_norm_of_a_recurrent_layer() -> None:
    from backquant.graph.hooks import hold_computed_weights

    torch.manual_seed(0)
    layer, x = nn.LSTM(4, 4), torch.randn(3, 1, 4)
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(layer, "weight_hh_l0")
    wanted = layer.eval()(x)[0]
    hold_computed_weights(layer)
    torch.testing.assert_close(layer(x)[0], wanted)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.jit.script(Net().eval())
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_part_in_torchscript_is_quantized() -> None:
    torch.manual_seed(0)
    model, x = Scripted().eval(), torch.randn(4, 3, 8, 8)
    quantized = backquant.quantize(model, x, backend="x86", calibration=[x], slower="keep")
    assert quantized.report.coverage == 1.0
    assert _noise(model(x), quantized(x)) < 1e-3


@pytest.mark.parametrize("change", CHANGES)
def test_exports_have_them_too(change: Callable[[Net], None]) -> None:
    net, x = _settled(change)
    quantized = backquant.quantize(
        net, x, backend="x86", calibration=[x], slower="keep", capture="export"
    )
    assert quantized.report.coverage == 1.0
    assert _noise(net(x), quantized(x)) < 1e-3


class Whole(nn.Module):
    """No export goes through ``odd``."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.odd, self.last = nn.Linear(8, 8), Odd(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.odd(self.first(x)))


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * float(x.detach().numpy().max())


def _odd_behind(model: Whole) -> None:
    model.odd.register_forward_hook(_doubled)


def _odd_before(model: Whole) -> None:
    model.odd.register_forward_pre_hook(_doubled_input)


def _odd_assigned(model: Whole) -> None:
    own = model.odd.forward
    model.odd.forward = lambda x: own(x) * 3  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [_odd_behind, _odd_before, _odd_assigned])
def test_modules_that_an_export_leaves_whole_have_them_once(
    change: Callable[[Whole], None],
) -> None:
    torch.manual_seed(0)
    model, x = Whole().eval(), torch.randn(6, 8)
    change(model)
    quantized = backquant.quantize(
        model, x, backend="x86", calibration=[x], slower="keep", capture="export"
    )
    assert 0 < quantized.report.coverage < 1
    assert _noise(model(x), quantized(x)) < 1e-3
