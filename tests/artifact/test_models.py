"""Models of many kinds, quantized in every way, saved and loaded: the same bits, call after call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import backquant
import backquant.qconfig
from backquant import PrepareCustomConfig, QConfig, QConfigMapping
from backquant.errors import CoverageError
from backquant.runtime import QuantizedModel

Again = Callable[..., QuantizedModel]


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.detach().contiguous().numpy().tobytes()
    return [bits(item) for item in value]


def check(model: QuantizedModel, inputs: tuple[Any, ...], again: Again) -> None:
    with torch.no_grad():
        expected = bits(model(*inputs))
        assert bits(model(*inputs)) == expected, "the model itself differs from call to call"
        loaded = again(model)
        assert bits(loaded(*inputs)) == expected
    assert loaded.audit() == model.audit() and loaded.kernels == model.kernels


class Zoo(nn.Module):
    """One of each operator that some engine has a kernel for, and some that none has."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.up, self.norm = nn.ConvTranspose2d(8, 8, 3, 2), nn.GroupNorm(2, 8)
        self.acts = nn.Sequential(nn.Hardswish(), nn.ELU(), nn.LeakyReLU(), nn.Sigmoid(), nn.GELU())
        self.inst, self.prelu, self.pool = nn.InstanceNorm2d(8), nn.PReLU(), nn.MaxPool2d(2)
        self.resize, self.depth = nn.Upsample(scale_factor=2), nn.Conv2d(8, 8, 3, groups=8)
        self.layer, self.fc, self.soft = nn.LayerNorm(8), nn.Linear(8, 4), nn.Softmax(1)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.acts(self.up(self.relu(self.bn(self.conv(x)))))
        x = self.prelu(self.resize(self.pool(self.inst(self.norm(x)))))
        a, b = torch.cat([x, self.drop(x)], 1).chunk(2, 1)
        x = self.depth(a * b + 2)
        x = self.layer(x.permute(0, 2, 3, 1)).mean([1, 2])
        return self.soft(self.fc(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.fc = (
            nn.LSTM(8, 8, 2, bidirectional=True),
            nn.GRU(16, 8),
            nn.Linear(8, 4),
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, (h, _) = self.lstm(x)
        return self.fc(self.gru(y)[0]), h


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.bag = nn.Embedding(20, 8), nn.EmbeddingBag(20, 8, mode="sum")
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.words(x).mean(1) + self.bag(x))


IMAGES = torch.randn(2, 3, 10, 10)
STEPS = torch.randn(5, 2, 8)
TEXT = torch.randint(0, 20, (3, 5))


@pytest.mark.parametrize(
    "backend", ["x86", "onednn", "fbgemm", "qnnpack", "native", "tensorrt", "executorch"]
)
def test_static(backend: str, round_trip: Again) -> None:
    model = backquant.quantize(Zoo(), backend=backend, calibration=[IMAGES])
    check(model, (IMAGES,), round_trip)


@pytest.mark.parametrize("backend", ["x86", "fbgemm", "qnnpack"])
@pytest.mark.parametrize(
    "qconfig", ["default_dynamic_qconfig", "per_channel_dynamic_qconfig", "float16_dynamic_qconfig"]
)
def test_dynamic(backend: str, qconfig: str, round_trip: Again) -> None:
    mapping = QConfigMapping().set_global(getattr(backquant.qconfig, qconfig))
    asked = {"backend": backend, "qconfig_mapping": mapping}
    if (backend, qconfig) == ("qnnpack", "float16_dynamic_qconfig"):
        with pytest.raises(CoverageError, match="requested input float16"):  # qnnpack has no kernel
            backquant.quantize(Recurrent(), STEPS, **asked)
        return
    check(backquant.quantize(Recurrent(), STEPS, **asked), (STEPS,), round_trip)


@pytest.mark.parametrize("backend", ["x86", "qnnpack"])
@pytest.mark.parametrize(
    "qconfig", ["float_qparams_weight_only_qconfig", "float_qparams_weight_only_qconfig_4bit"]
)
def test_weight_only(backend: str, qconfig: str, round_trip: Again) -> None:
    mapping = QConfigMapping()
    for kind in (nn.Embedding, nn.EmbeddingBag):
        mapping.set_object_type(kind, getattr(backquant.qconfig, qconfig))
    model = backquant.quantize(Words(), TEXT, backend=backend, qconfig_mapping=mapping)
    check(model, (TEXT,), round_trip)


def test_after_training(round_trip: Again) -> None:
    mapping = backquant.get_default_qat_qconfig_mapping("x86")
    config = backquant.backend_config.get_x86_backend_config()
    prepared = backquant.prepare_qat_fx(Zoo(), mapping, IMAGES, backend_config=config)
    prepared(IMAGES).sum().backward()
    check(backquant.convert_fx(prepared.eval()), (IMAGES,), round_trip)


def test_the_steps_by_name(round_trip: Again) -> None:
    mapping = backquant.get_default_qconfig_mapping("onednn")
    config = backquant.backend_config.get_onednn_backend_config()
    prepared = backquant.prepare_fx(Zoo().eval(), mapping, IMAGES, backend_config=config)
    prepared(IMAGES)
    model = backquant.convert_fx(prepared)
    check(model, (IMAGES,), round_trip)
    assert round_trip(model).report == model.report


def test_other_observers(round_trip: Again) -> None:
    qconfig = QConfig(
        backquant.MinMaxObserver.with_args(reduce_range=True),
        backquant.observe.default_weight_observer,
    )
    mapping = QConfigMapping().set_global(qconfig)
    check(
        backquant.quantize(Zoo(), calibration=[IMAGES], qconfig_mapping=mapping),
        (IMAGES,),
        round_trip,
    )


class Leaves(nn.Module):
    """Modules that no backend quantizes statically, between two that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.lstm, self.norm = nn.LSTM(8, 8, batch_first=True), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.first(x))
        x = self.lstm(self.attention(x, x, x)[0])[0]
        return self.last(self.norm(x.transpose(1, 2)).transpose(1, 2))


def test_leaves_that_stay_float(round_trip: Again) -> None:
    custom = PrepareCustomConfig().set_non_traceable_module_names(["encoder", "attention"])
    model = backquant.quantize(
        Leaves(), calibration=[STEPS], capture="trace", prepare_custom_config=custom
    )
    floats = {row.operator for row in model.report.float_rows}
    assert {"TransformerEncoderLayer", "MultiheadAttention"} <= floats
    check(model, (STEPS,), round_trip)


def test_a_parametrized_module_in_float_is_stored_as_what_it_computes(round_trip: Again) -> None:
    normed = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3))
    net = nn.Sequential(nn.Conv2d(3, 3, 1), normed)
    mapping = backquant.get_default_qconfig_mapping("x86").set_module_name("1", None)
    model = backquant.quantize(net, calibration=[IMAGES], qconfig_mapping=mapping)
    assert type(model.get_submodule("1")) is nn.Conv2d
    assert nn.utils.parametrize.is_parametrized(normed)
    check(model, (IMAGES,), round_trip)
