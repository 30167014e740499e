"""A prepared model, observed or for training, that is handed to what takes float models: refused with the
conversion that it needs, and the conversion works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant import UsageError
from backquant.qconfig import get_default_qat_qconfig_mapping, get_default_qconfig_mapping

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def _observed() -> nn.Module:
    prepared = backquant.prepare_fx(_model().eval(), get_default_qconfig_mapping("x86"), (X,))
    prepared(X)
    return prepared


def _exported() -> nn.Module:
    prepared = backquant.prepare_export(_model(), get_default_qconfig_mapping("x86"), (X,))
    prepared(X)
    return prepared


def _trained() -> nn.Module:
    mapping = get_default_qat_qconfig_mapping("x86")
    prepared = backquant.prepare_qat_fx(_model().train(), mapping, (X,))
    prepared(X).sum().backward()
    return prepared.eval()


def _inside() -> nn.Module:
    return nn.Sequential(_trained(), nn.ReLU())


def _of_torch() -> nn.Module:
    from torch.ao.quantization import QConfigMapping, default_qconfig
    from torch.ao.quantization.quantize_fx import prepare_fx

    return prepare_fx(_model().eval(), QConfigMapping().set_global(default_qconfig), (X,))


MODELS = [_observed, _exported, _trained, _inside, _of_torch]
FLOWS: dict[str, Callable[[nn.Module], Any]] = {
    "quantize": lambda model: backquant.quantize(model, calibration=[X]),
    "explain": lambda model: backquant.explain(model, X),
    "parts": lambda model: backquant.quantize_parts(model, calibration=[X]),
    "prepare": lambda model: backquant.prepare_fx(model, get_default_qconfig_mapping("x86"), (X,)),
    "prepare for training": lambda model: backquant.prepare_qat_fx(
        model, get_default_qat_qconfig_mapping("x86"), (X,)
    ),
    "search": lambda model: backquant.search(model, [X], budget={"min_sqnr": 20}, times=None),
}


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("made", MODELS, ids=lambda made: made.__name__[1:])
def test_prepared_models_are_refused(made: Callable[[], nn.Module], flow: str) -> None:
    with pytest.raises(UsageError, match="prepared already"):
        FLOWS[flow](made())


@pytest.mark.parametrize("made", MODELS[:-1], ids=lambda made: made.__name__[1:])
def test_the_fix_works(made: Callable[[], nn.Module], snapshot: Callable[..., None]) -> None:
    model = made()
    with pytest.raises(UsageError) as refused:
        backquant.quantize(model, calibration=[X])
    snapshot(made.__name__[1:], refused.value)
    converted = eval(refused.value.fix, {"model": model, "backquant": backquant})
    assert converted.report.quantized
    assert converted(X).shape == (16, 8)


def _quantized(converted: Callable[..., Any]) -> Any:
    prepared = backquant.prepare_fx(_model().eval(), get_default_qconfig_mapping("x86"), (X,))
    prepared(X)
    return converted(prepared)


QUANTIZED: dict[str, Callable[[], nn.Module]] = {
    "converted": lambda: _quantized(backquant.convert_fx),
    "reference": lambda: _quantized(backquant.convert_to_reference_fx),
    "inside": lambda: nn.Sequential(_quantized(backquant.convert_to_reference_fx), nn.ReLU()),
    "its layer": lambda: nn.Sequential(
        _quantized(backquant.convert_to_reference_fx).get_submodule("0")
    ),
    "a quantized part": lambda: nn.Sequential(_quantized(backquant.convert_fx), nn.Linear(8, 8)),
}


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("made", QUANTIZED)
def test_quantized_models_are_refused(made: str, flow: str) -> None:
    with pytest.raises(UsageError, match="quantized already"):
        FLOWS[flow](QUANTIZED[made]())
