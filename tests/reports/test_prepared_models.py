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

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.ao's and torchao's own calls
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


def _eager(trains: bool = False) -> nn.Module:
    from torch.ao.quantization import (
        DeQuantStub,
        QuantStub,
        get_default_qat_qconfig,
        get_default_qconfig,
        prepare,
        prepare_qat,
    )

    model = nn.Sequential(QuantStub(), _model(), DeQuantStub()).train(trains)
    model.qconfig = get_default_qat_qconfig("x86") if trains else get_default_qconfig("x86")
    prepared = (prepare_qat if trains else prepare)(model)
    prepared(X)
    return prepared.eval()


def _trained_eagerly() -> nn.Module:
    return _eager(trains=True)


def _averaged() -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(_trained())


FLOWS: dict[str, Callable[[nn.Module], Any]] = {
    "quantize": lambda model: backquant.quantize(model, calibration=[X]),
    "explain": lambda model: backquant.explain(model, X),
    "parts": lambda model: backquant.quantize_parts(model, calibration=[X]),
    "prepare": lambda model: backquant.prepare_fx(model, get_default_qconfig_mapping("x86"), (X,)),
    "prepare for training": lambda model: backquant.prepare_qat_fx(
        model, get_default_qat_qconfig_mapping("x86"), (X,)
    ),
    "search": lambda model: backquant.search(model, [X], budget={"min_sqnr": 20}, times=None),
    "sensitivity": lambda model: backquant.sensitivity(model, data=[X]),
    "fuse": backquant.fuse_fx,
    "dynamic": lambda model: backquant.api.quantize_dynamic(model, {nn.Linear}),
    "weights alone": lambda model: backquant.quantize(model, X, weights="int8"),
}
MODELS = [_observed, _exported, _trained, _inside, _averaged, _of_torch, _eager, _trained_eagerly]
OURS = MODELS[:4]


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("made", MODELS, ids=lambda made: made.__name__[1:])
def test_prepared_models_are_refused(made: Callable[[], nn.Module], flow: str) -> None:
    with pytest.raises(UsageError, match="prepared already"):
        FLOWS[flow](made())


@pytest.mark.parametrize("made", OURS, ids=lambda made: made.__name__[1:])
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


def _converted_by_torch(function: str) -> nn.Module:
    from torch.ao.quantization import quantize_fx

    prepared = _of_torch()
    prepared(X)
    return getattr(quantize_fx, function)(prepared)


def _by_torchao(config: str) -> nn.Module:
    from torchao import quantization

    model = _model().eval()
    quantization.quantize_(model, getattr(quantization, config)())
    return model


def _for_training_by_torchao() -> nn.Module:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    model = _model().eval()
    weights = IntxFakeQuantizeConfig(torch.int8, group_size=8)
    quantize_(model, QATConfig(weight_config=weights, step="prepare"))
    return model


QUANTIZED: dict[str, Callable[[], nn.Module]] = {
    "converted": lambda: _quantized(backquant.convert_fx),
    "reference": lambda: _quantized(backquant.convert_to_reference_fx),
    "inside": lambda: nn.Sequential(_quantized(backquant.convert_to_reference_fx), nn.ReLU()),
    "its layer": lambda: nn.Sequential(
        _quantized(backquant.convert_to_reference_fx).get_submodule("0")
    ),
    "a quantized part": lambda: nn.Sequential(_quantized(backquant.convert_fx), nn.Linear(8, 8)),
    "dynamic": lambda: backquant.api.quantize_dynamic(_model().eval(), {nn.Linear}),
    "torch.ao": lambda: _converted_by_torch("convert_fx"),
    "torch.ao's reference": lambda: _converted_by_torch("convert_to_reference_fx"),
    "torch.ao, eager": lambda: torch.ao.quantization.convert(_eager()),
    "torch.ao, dynamic": lambda: torch.ao.quantization.quantize_dynamic(_model().eval()),
    "torchao": lambda: _by_torchao("Int8WeightOnlyConfig"),
    "torchao, activations": lambda: _by_torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao, training": _for_training_by_torchao,
}


@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("made", QUANTIZED)
def test_quantized_models_are_refused(made: str, flow: str) -> None:
    with pytest.raises(UsageError, match="quantized already"):
        FLOWS[flow](QUANTIZED[made]())


def test_a_program_of_integers_is_refused() -> None:
    quantized = backquant.quantize(_model().eval(), calibration=[X], backend="onnxruntime")
    with pytest.raises(UsageError, match="quantized already: its program calls"):
        backquant.quantize(torch.export.export(quantized, (X,)), calibration=[X])


@pytest.mark.parametrize("made", [m for m in QUANTIZED if "torch" in m])
@pytest.mark.parametrize("convert", [backquant.convert_fx, backquant.convert_to_reference_fx])
def test_no_conversion_takes_them(convert: Callable[..., Any], made: str) -> None:
    with pytest.raises(UsageError):
        convert(QUANTIZED[made]())


def test_float_functionals_of_torch_are_float() -> None:
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.sum = nn.Linear(8, 8), torch.ao.nn.quantized.FloatFunctional()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.sum.add(self.layer(x), x)

    assert backquant.quantize(Adding().eval(), calibration=[X]).report.quantized
