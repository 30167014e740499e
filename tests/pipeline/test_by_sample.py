"""``backquant.pipeline.by_sample``: which layers get a range for each sample, and what that gains."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import backquant
from backquant.observe import MinMaxObserver, default_per_channel_weight_observer
from backquant.qconfig import QConfig, QConfigMapping, get_default_qconfig_mapping

NOTE = "inputs are scaled sample by sample"


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 32, 9), nn.ReLU()).eval()


def _sounds(quietest: float, count: int = 4) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    loud = torch.logspace(0, torch.tensor(quietest).log10().item(), 8).reshape(8, 1, 1)
    return [torch.randn(8, 2, 64, generator=made) * loud for _ in range(count)]


def _noted(model: backquant.QuantizedModel) -> list[str]:
    return [note for note in model.plan.notes if note.startswith(NOTE)]


def _decibels(model: nn.Module, found: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """For each sample, of what the input changes: without the constant that biases give."""
    base = model(torch.zeros_like(x))
    wanted, got = model(x) - base, found(x) - base
    noise = (wanted - got).square().sum((1, 2))
    return 10 * torch.log10(wanted.square().sum((1, 2)) / noise)


def test_quiet_samples_beside_loud_ones() -> None:
    model, data = _model(), _sounds(1e-3)
    found = backquant.quantize(model, calibration=data, slower="keep")
    assert _noted(found) == [
        f"{NOTE}, as no one range holds all samples of the calibration data: 0"
    ]
    assert found.report.coverage == 1.0
    asked = backquant.default_mapping("x86")
    asked.set_module_name("0", asked.global_qconfig)  # what is named is followed
    plain = backquant.quantize(model, calibration=data, qconfig_mapping=asked)
    assert not _noted(plain)
    x = _sounds(1e-3, 5)[-1]
    with torch.no_grad():
        levels, before = _decibels(model, found, x), _decibels(model, plain, x)
    assert levels[-1] > before[-1] + 15
    assert levels.min() > 30  # not of the quietest alone


@pytest.mark.parametrize("quietest", [1.0, 0.3])
def test_samples_that_are_alike_have_one_range(quietest: float) -> None:
    found = backquant.quantize(_model(), calibration=_sounds(quietest), slower="keep")
    assert not _noted(found)


@pytest.mark.parametrize("made", [backquant.default_mapping, get_default_qconfig_mapping])
def test_the_defaults_but_for_one_layer_are_still_the_defaults(
    made: Callable[[str], QConfigMapping],
) -> None:
    torch.manual_seed(0)
    sizes = ((2, 32), (32, 8), (8, 8))
    model = nn.Sequential(*(nn.Conv1d(*size, 9, bias=False) for size in sizes)).eval()
    mapping = made("x86").set_module_name("1", None)
    found = backquant.quantize(model, calibration=_sounds(1e-3), qconfig_mapping=mapping)
    (note,) = _noted(found)
    assert note.endswith(": 0, 2")
    assert [row.outcome for row in found.report.rows if row.module_path == "1"] == ["float"]


def test_a_mapping_that_asks_for_something_else_is_followed() -> None:
    mapping = QConfigMapping().set_global(
        QConfig(MinMaxObserver.with_args(quant_max=127), default_per_channel_weight_observer)
    )
    assert not _noted(
        backquant.quantize(_model(), calibration=_sounds(1e-3), qconfig_mapping=mapping)
    )


def test_a_set_that_comes_once_is_not_read_ahead() -> None:
    data = _sounds(1e-3)

    def once() -> Iterator[torch.Tensor]:
        yield from data

    found = backquant.quantize(_model(), data[0], calibration=once(), slower="keep")
    assert not _noted(found)


def test_what_is_scaled_is_saved_and_loaded(tmp_path: object) -> None:
    model, data = _model(), _sounds(1e-3)
    found = backquant.quantize(model, calibration=data, slower="keep")
    path = f"{tmp_path}/model.bq"
    backquant.save(found, path)
    loaded = backquant.load(path)
    assert torch.equal(loaded(data[0]), found(data[0]))
    assert backquant.compare(model, loaded, data).sqnr > 30  # its float graph is scaled, too


def test_what_makes_a_value_that_is_scaled_stays_float() -> None:
    """Rounded in the range of the loudest before, a quiet sample has nothing left to scale."""
    torch.manual_seed(0)
    layers = [nn.Conv1d(2, 32, 9, bias=False), nn.LeakyReLU(0.1), nn.Conv1d(32, 8, 9, bias=False)]
    model, data = nn.Sequential(*layers).eval(), _sounds(1e-3)
    found = backquant.quantize(model, calibration=data, slower="keep")
    assert not found.plan.decisions["_1"].quantized
    assert any("stay float before inputs that are scaled (_1)" in note for note in found.plan.notes)
    x = _sounds(1e-3, 5)[-1]
    with torch.no_grad():
        assert _decibels(model, found, x).min() > 30


def test_rules_count_operators_after_the_scaling() -> None:
    """A sum before a root stays float, though the scaling puts sums and products before it."""

    class Magnitudes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv1d(2, 32, 9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.layer(x)
            return torch.sqrt(found[:, :16] * found[:, :16] + found[:, 16:] * found[:, 16:])

    model, data = Magnitudes().eval(), _sounds(1e-3)
    found = backquant.quantize(model, calibration=data, slower="keep")
    assert _noted(found)
    assert [d.operator for d in found.plan.decisions.values() if d.quantized] == ["Conv1d"]


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_channels_have_ranges_of_their_own_where_results_are_rounded(backend: str) -> None:
    """ONNX Runtime's kernels give integers; OpenVINO's give floats to float operators."""
    torch.manual_seed(0)
    layer = nn.Conv1d(2, 8, 9)
    with torch.no_grad():
        layer.weight *= torch.logspace(0, -2, 8).reshape(8, 1, 1)
    model, data = nn.Sequential(layer).eval(), _sounds(1e-3)
    found = backquant.quantize(model, backend=backend, calibration=data)
    assert len(found.plan.by_sample["_0"].channels) == (8 if backend == "onnxruntime" else 0)
    x = _sounds(1e-3, 5)[-1]
    with torch.no_grad():
        base = layer.bias.reshape(8, 1)
        wanted, got = model(x) - base, found(x) - base
    noise = (wanted - got).square().sum((0, 2))
    assert (10 * torch.log10(wanted.square().sum((0, 2)) / noise)).min() > 30
    assert backquant.compare(model, found, data).sqnr > 30
