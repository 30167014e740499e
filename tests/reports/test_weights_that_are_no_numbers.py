"""A checkpoint whose training diverged: NaN and infinite weights are refused by name before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import backquant
from backquant import UsageError
from backquant.qconfig import get_default_qat_qconfig_mapping, get_default_qconfig_mapping

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
PLACES = ["0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "5.weight"]


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    features = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 64)).eval()


def _diverged(place: str, value: float) -> nn.Sequential:
    model = _model()
    with torch.no_grad():
        model.state_dict()[place].view(-1)[0] = value
    return model


def _files(model: nn.Module, folder: Path) -> Any:
    save_file(model.state_dict(), folder / "model.safetensors")
    return backquant.quantize_files(_model, folder, folder / "m.bq", calibration=[X])


def _prepare(model: nn.Module) -> Any:
    return backquant.prepare_fx(model, get_default_qconfig_mapping("x86"), (X,))


def _prepare_qat(model: nn.Module) -> Any:
    mapping = get_default_qat_qconfig_mapping("x86")
    return backquant.prepare_qat_fx(model.train(), mapping, (X,))


def _prepare_export(model: nn.Module) -> Any:
    return backquant.prepare_export(model, get_default_qconfig_mapping("x86"), (X,))


FLOWS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "quantize": lambda model, _: backquant.quantize(model, calibration=[X]),
    "weights alone": lambda model, _: backquant.quantize(model, X, weights="int8"),
    "explain": lambda model, _: backquant.explain(model, X),
    "parts": lambda model, _: backquant.quantize_parts(model, calibration=[X]),
    "files": _files,
    "prepare": lambda model, _: _prepare(model),
    "prepare for training": lambda model, _: _prepare_qat(model),
    "prepare an export": lambda model, _: _prepare_export(model),
    "fuse": lambda model, _: backquant.fuse_fx(model),
    "dynamic": lambda model, _: backquant.api.quantize_dynamic(model, {nn.Linear}),
    "search": lambda model, _: backquant.search(model, [X], budget={"min_sqnr": 20}, times=None),
    "sensitivity": lambda model, _: backquant.sensitivity(model, data=[X]),
}


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_every_flow_refuses_them(flow: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'0\.weight' holds 1|'0\.weight' holds 0 NaN and 1"):
        FLOWS[flow](_diverged("0.weight", value), tmp_path)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", PLACES)
def test_every_weight_is_looked_at(place: str, value: float) -> None:
    with pytest.raises(UsageError) as refused:
        backquant.quantize(_diverged(place, value), calibration=[X])
    assert refused.value.where == place


def test_the_fix_finds_them(snapshot: Callable[..., None]) -> None:
    model = _diverged("1.running_var", math.nan)
    with pytest.raises(UsageError) as refused:
        backquant.quantize(model, calibration=[X])
    snapshot("not-finite", refused.value)
    assert eval(refused.value.fix.splitlines()[1], {"model": model}) == ["1.running_var"]


def test_a_model_that_diverged_in_training_is_not_converted() -> None:
    prepared = _prepare_qat(_model())
    prepared(X).sum().backward()
    with torch.no_grad():
        next(prepared.parameters()).fill_(math.nan)
    with pytest.raises(UsageError, match="NaN"):
        backquant.convert_fx(prepared.eval())


def test_half_a_weight_is_no_infinity() -> None:
    """The sum of these overflows, and none of them is infinite."""
    model = nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64)).eval()
    with torch.no_grad():
        model[1].weight.fill_(2.0**127)
    assert backquant.explain(model, torch.randn(2, 8)) is not None


@pytest.mark.parametrize("flow", FLOWS)
def test_no_variance_is_below_zero(
    flow: str, tmp_path: Path, snapshot: Callable[..., None]
) -> None:
    """A checkpoint that was loaded by the order of its tensors: the mean stands where the variance should."""
    with pytest.raises(UsageError) as refused:
        FLOWS[flow](_diverged("1.running_var", -0.5), tmp_path)
    snapshot("below-zero", refused.value)


class Masked(nn.Module):
    """Attention of the past alone: the mask holds minus infinity."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        mask = torch.full((4, 4), -math.inf).triu(1)
        if kind == "buffer":
            self.register_buffer("mask", mask)
        else:
            self.mask = nn.Parameter(mask, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2) + self.mask
        return scores.softmax(-1) @ x


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_masks_hold_minus_infinity(kind: str) -> None:
    model, x = Masked(kind).eval(), torch.randn(2, 4, 8)
    quantized = backquant.quantize(model, calibration=[x], slower="keep")
    assert torch.allclose(quantized(x), model(x), atol=0.1)


class Scaled(nn.Module):
    """A buffer is a factor of what is computed."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 64)
        self.register_buffer("scale", torch.full((8,), value), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x * self.scale).softmax(-1)


ON_EXAMPLES: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "quantize": lambda model, x: backquant.quantize(model, calibration=[x]),
    "weights alone": lambda model, x: backquant.quantize(model, x, weights="int8"),
    "explain": backquant.explain,
    "prepare": lambda model, x: backquant.prepare_fx(
        model, get_default_qconfig_mapping("x86"), (x,)
    ),
    "prepare for training": lambda model, x: backquant.prepare_qat_fx(
        model.train(), get_default_qat_qconfig_mapping("x86"), (x,)
    ),
    "prepare an export": lambda model, x: backquant.prepare_export(
        model, get_default_qconfig_mapping("x86"), (x,)
    ),
    "parts": lambda model, x: backquant.quantize_parts(model, calibration=[x]),
}


@pytest.mark.parametrize("flow", ON_EXAMPLES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_buffer_by_which_the_model_gives_nan(
    value: float, flow: str, snapshot: Callable[..., None]
) -> None:
    with pytest.raises(UsageError) as refused:
        ON_EXAMPLES[flow](Scaled(value).eval(), torch.randn(4, 8))
    snapshot("buffer", refused.value)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.norm, self.prelu = nn.LayerNorm(8), nn.PReLU()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.prelu(self.norm(self.embedding(tokens)))
        x, _ = self.lstm(self.attention(x, x, x)[0])
        return self.head(x)


@pytest.mark.parametrize("place", [name for name, _ in Tied().named_parameters()])
def test_every_layer_is_looked_at(place: str) -> None:
    model = Tied().eval()
    with torch.no_grad():
        model.get_parameter(place).view(-1)[0] = math.nan
    with pytest.raises(UsageError) as refused:
        backquant.quantize(model, calibration=[torch.randint(0, 10, (2, 4))])
    assert refused.value.where == place
