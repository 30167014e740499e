"""What a description leaves in float by default stays float in training, too."""

from __future__ import annotations

import copy
import operator
import random
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

import backquant
from backquant.backend_config import BackendConfig, LeaveFloat, QDQRules
from backquant.prepare import PreparedModule, prepared_state


class Normed(nn.Module):
    """A norm as the decoders of transformers write it: the smallest variances round to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.second(self.weight * y)


def _normed() -> Normed:
    model = Normed()
    nn.init.zeros_(model.first.bias)
    return model


def _scattered() -> torch.Tensor:
    return torch.randn(64, 8) * torch.logspace(-4, 0, 64).unsqueeze(1)


def _without_rules() -> BackendConfig:
    config = copy.deepcopy(backquant.get_backend_config("x86"))
    assert config.defaults is not None
    return config.set_defaults(replace(config.defaults, leave_float=()))


def _prepared(model: nn.Module, x: Any, backend: Any = "x86", mapping: Any = None) -> Any:
    mapping = mapping or backquant.get_default_qat_qconfig_mapping("x86")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return backquant.prepare_qat_fx(model.train(), mapping, x, backend_config=backend)


def _outcomes(prepared: PreparedModule) -> dict[str, str]:
    return {row.node: row.outcome for row in prepared.report.rows}


@pytest.mark.parametrize("backend", ["x86", "fbgemm", "onednn", "qnnpack", "native"])
def test_norms_that_are_written_out_train_and_convert(backend: str) -> None:
    torch.manual_seed(0)
    model, x = _normed(), _scattered()
    mapping = backquant.get_default_qat_qconfig_mapping(backend)
    prepared = _prepared(model, x, backend, mapping)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = prepared(x).square().mean()
        loss.backward()
        optimizer.step()
        assert loss.isfinite()
    prepared.apply(backquant.disable_observer).eval()
    with torch.no_grad():
        wanted = prepared(x)
        noise = (backquant.convert_fx(prepared)(x) - wanted).square().sum()
    assert noise < 0.01 * wanted.square().sum()
    rows = {row.node: row for row in prepared.report.rows}
    for name in ("mean", "add", "mul", "mul_1"):
        assert rows[name].outcome == "float"
        assert rows[name].reasons[0].place.startswith(f"{backend}, defaults.leave_float[")


def test_a_description_without_rules_is_torchs() -> None:
    """And gives NaN, as PyTorch does."""
    from torch.ao.quantization import get_default_qat_qconfig_mapping, quantize_fx
    from torch.ao.quantization.backend_config.x86 import get_x86_backend_config

    torch.manual_seed(0)
    model, x = _normed(), _scattered()
    ours = _prepared(model, x, _without_rules())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = quantize_fx.prepare_qat_fx(
            copy.deepcopy(model),
            get_default_qat_qconfig_mapping("x86"),
            (x,),
            backend_config=get_x86_backend_config(),
        )
    assert ours.code == theirs.code
    assert ours(x).isnan().any() and theirs(x).isnan().any()


class Block(nn.Module):
    """A residual addition before a norm, as a transformer has it, and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.register_buffer("mask", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        y = torch.add(self.down(x), self.mask)
        return self.norm(x + y)


def _names_type(mapping: Any, qconfig: Any) -> Any:
    return mapping.set_object_type(operator.add, qconfig)


def _names_use(mapping: Any, qconfig: Any) -> Any:
    return mapping.set_module_name_object_type_order("", operator.add, 0, qconfig)


@pytest.mark.parametrize("names", [_names_type, _names_use])
def test_what_the_request_names_is_followed(names: Any) -> None:
    x = torch.randn(4, 8)
    assert _outcomes(_prepared(Block(), x))["add_1"] == "float"
    mapping = backquant.get_default_qat_qconfig_mapping("x86")
    mapping = names(mapping, backquant.get_default_qat_qconfig("x86"))
    found = _outcomes(_prepared(Block(), x, mapping=mapping))
    assert (found["add"], found["add_1"]) == ("float", "quantized")


@pytest.mark.parametrize("version", [0, 1])
def test_the_mappings_of_the_backend_name_nothing(version: int) -> None:
    mapping = backquant.get_default_qat_qconfig_mapping("x86", version)
    found = _outcomes(_prepared(Block(), torch.randn(4, 8), mapping=mapping))
    assert (found["add"], found["add_1"]) == ("float", "float")


def test_conversion_takes_the_mapping_that_was_passed() -> None:
    x, mapping = torch.randn(4, 8), backquant.get_default_qat_qconfig_mapping("x86")
    prepared = _prepared(Block(), x, mapping=mapping)
    prepared(x)
    less = backquant.convert_fx(
        prepared.eval(), qconfig_mapping=copy.deepcopy(mapping).set_module_name("up", None)
    )
    found = {row.node: row.outcome for row in less.report.rows}
    assert (found["up"], found["down"], found["add_1"]) == ("float", "quantized", "float")


class Ends(nn.Module):
    """Arithmetic at both ends of a model, which PyTorch rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.flatten(torch.sigmoid(self.conv(x * x)), 1)


def test_what_enters_and_leaves_a_model_is_rounded_as_by_torch() -> None:
    """``quantize`` leaves both in float, where nothing else reads or gives integers."""
    found = _outcomes(_prepared(Ends(), torch.randn(2, 3, 4, 4)))
    assert set(found.values()) == {"quantized"}


def test_standalone_modules_have_the_rules() -> None:
    custom = backquant.PrepareCustomConfig().set_standalone_module_name("0", None, (), None, None)
    model, x = nn.Sequential(_normed(), nn.Linear(8, 8)), _scattered()
    mapping: Any = backquant.get_default_qat_qconfig_mapping("x86")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = backquant.prepare_qat_fx(model, mapping, (x,), custom, backend_config="x86")
    assert prepared(x).isfinite().all()


@fx.wrap
def dropped(x: torch.Tensor, training: bool) -> torch.Tensor:
    return x * (torch.rand(x.shape[0], 1, 1, 1) < 0.8) if training else x


class Path(nn.Module):
    """A residual path that a wrapped function drops, as torchvision's ``StochasticDepth``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + dropped(self.conv(x), self.training)


def test_paths_that_a_function_drops_are_looked_through() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Path(), Path()), torch.randn(2, 3, 6, 6)
    prepared = _prepared(model, x)
    found = _outcomes(prepared)
    assert (found["add"], found["add_1"]) == ("quantized", "quantized")
    prepared(x)
    quantized = backquant.convert_fx(prepared.eval())
    targets = [node.target for node in quantized.graph_module.graph.nodes]
    assert dropped not in targets
    wanted = prepared.apply(backquant.disable_observer)(x)
    assert (quantized(x) - wanted).abs().max() <= 0.05 * wanted.abs().max()


def test_they_are_no_news_for_the_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mapping: Any = backquant.get_default_qat_qconfig_mapping("x86")
        model = nn.Sequential(nn.Linear(8, 8), Block()).train()
        prepared = backquant.prepare_qat_fx(model, mapping, torch.randn(4, 8), backend_config="x86")
    assert _outcomes(prepared)["add_1"] == "float"


class Activated(nn.Module):
    """Results that a float operator reads, through a view too, that an integer operator reads, that are
    returned."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.act = nn.Softplus()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.act(self.layers[0](x))
        x = self.act(self.layers[1](x).view(-1, 2, 4))
        x = self.layers[3](self.layers[2](x.reshape(-1, 8)))
        return x, self.layers[4](x)


def _observed(prepared: PreparedModule) -> set[str]:
    """The layers whose results are rounded."""
    return {site.value for site in prepared_state(prepared).sites.sites if site.producer}


def test_results_that_only_floats_read_are_not_rounded() -> None:
    """What the model returns is rounded, as by PyTorch."""
    torch.manual_seed(0)
    x = torch.randn(6, 8)
    prepared = _prepared(Activated(), x)
    assert _observed(prepared) == {"layers_2", "layers_3", "layers_4"}
    all_of_them = _observed(_prepared(Activated(), x, _without_rules()))
    assert all_of_them >= {"layers_0", "layers_1", "layers_2", "layers_3", "layers_4"}
    prepared(x)
    quantized = backquant.convert_fx(prepared.apply(backquant.disable_observer).eval())
    dtypes = [use.dtype for use in quantized.kernels if "linear" in use.kernel]
    assert dtypes == [torch.float32, torch.float32, torch.uint8, torch.uint8, torch.uint8]
    for mine, wanted in zip(quantized(x), prepared(x), strict=True):
        assert (mine - wanted).abs().max() <= 0.05 * wanted.abs().max()


def test_a_target_that_never_rounds_results_trains_without_rounding_them() -> None:
    rule = LeaveFloat((nn.Linear,), results=True)
    config = _without_rules().set_qdq(QDQRules(leave_float=(rule,)))
    found = _observed(_prepared(Activated(), torch.randn(6, 8), config))
    assert found & {f"layers_{number}" for number in range(5)} == {"layers_2", "layers_3"}


class Masked(nn.Module):
    """It draws a mask by sizes and numbers of Python, in training alone, as SpecAugment does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop, self.head = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, flag: bool = True) -> torch.Tensor:
        if self.training:
            x = (
                x
                * torch.tensor([random.choice(range(int(row.sum() > 0) + 1)) for row in x])[:, None]
            )
        return self.head(self.drop(self.fc(x) if flag and x.shape[-1] == 8 else x))


def test_a_model_that_is_captured_in_evaluation_alone_trains_as_in_evaluation() -> None:
    torch.manual_seed(0)
    model, x = Masked().train(), torch.randn(16, 8)
    mapping: Any = backquant.get_default_qat_qconfig_mapping("x86")
    with pytest.warns(UserWarning, match="in both modes what the model does in evaluation mode"):
        prepared = backquant.prepare_qat_fx(model, mapping, (x,), backend_config="x86")
    assert prepared.training and model.training
    assert not torch.equal(prepared(x), prepared(x))  # dropout drops
    prepared(x).square().mean().backward()
    assert all(parameter.grad is not None for parameter in prepared.parameters())
    prepared.apply(backquant.disable_fake_quant).eval()
    torch.testing.assert_close(prepared(x), model.eval()(x))
