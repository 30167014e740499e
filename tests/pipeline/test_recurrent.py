"""Recurrent layers by default: at each call, in 8 bits or in float16, or in float, by what they lose."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from benchmarks.stock.catalogue import catalogue
from torch import nn

import backquant
from backquant import QConfigMapping, default_dynamic_qconfig
from backquant.runtime import QuantizedModel

INT8, FLOAT16 = "x86, 7 bits", "x86, float16"


def decibels(wanted: torch.Tensor, got: torch.Tensor) -> float:
    return float(10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum()))


def kernels(model: QuantizedModel) -> list[str]:
    return [use.kernel for use in model.kernels]


class Tagger(nn.Module):
    """A convolution, a recurrent layer that may be given its state, and a linear layer."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 16, 3, padding=1)
        self.rnn = kind(16, 24, batch_first=True)
        self.fc = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor, state: Any = None) -> torch.Tensor:
        found, _ = self.rnn(torch.relu(self.conv(x)).transpose(1, 2), state)
        return self.fc(found)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("capture", ["trace", "export"])
def test_static_and_dynamic_in_one_call(kind: type[nn.RNNBase], capture: str) -> None:
    torch.manual_seed(0)
    model, x, h = Tagger(kind).eval(), torch.randn(2, 8, 12), torch.randn(1, 2, 24)
    state = (h, h) if kind is nn.LSTM else h
    made = backquant.quantize(
        model, (x, state), calibration=[(x, state)], capture=capture, slower="keep"
    )
    assert f"aten.quantized_{kind.__name__.lower()}({INT8})" in kernels(made)
    assert made.report.coverage == 1.0
    assert any("quantized at each call by default on x86: rnn" in n for n in made.report.notes)
    with torch.no_grad():
        assert decibels(model(x, state), made(x, state)) > 25


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell])
def test_a_recurrent_layer_by_itself(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = kind(16, 24).eval(), torch.randn(5, 16)
    made = backquant.quantize(model, x, calibration=[x], slower="keep")
    assert made.report.coverage == 1.0
    h = torch.randn(*((1, 24) if isinstance(model, nn.RNNBase) else (5, 24)))
    given = (h, h) if kind in (nn.LSTM, nn.LSTMCell) else h
    with torch.no_grad():
        for arguments in ({}, {"hx": given}):
            wanted, got = model(x, **arguments), made(x, **arguments)
            one, two = (v if isinstance(v, torch.Tensor) else v[0] for v in (wanted, got))
            assert decibels(one, two) > 25


def test_a_cell_that_an_export_calls() -> None:
    class Steps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTMCell(8, 16)

        def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            for step in range(3):
                h, c = self.cell(x[:, step], (h, c))
            return h

    torch.manual_seed(0)
    model, inputs = Steps().eval(), (torch.randn(2, 3, 8), torch.zeros(2, 16), torch.zeros(2, 16))
    made = backquant.quantize(model, inputs, calibration=[inputs], capture="export", slower="keep")
    assert kernels(made) == [f"quantized.quantized_lstm_cell_dynamic({INT8})"] * 3
    with torch.no_grad():
        assert decibels(model(*inputs), made(*inputs)) > 25


def with_large_weights(largest: float) -> nn.LSTM:
    """Half of the inputs are small, and their weights large."""
    torch.manual_seed(0)
    model = nn.LSTM(8, 16).eval()
    with torch.no_grad():
        model.weight_ih_l0[:, :4] *= largest
    return model


SMALL_AND_LARGE = torch.randn(6, 2, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor(
    [1e-3] * 4 + [1.0] * 4
)


def test_weights_that_8_bits_make_useless_are_in_float16() -> None:
    model = with_large_weights(1e3)
    made = backquant.quantize(model, SMALL_AND_LARGE, calibration=[SMALL_AND_LARGE], slower="keep")
    assert kernels(made) == [f"aten.quantized_lstm({FLOAT16})"]
    # what counts is the data, not the example
    made = backquant.quantize(
        model, torch.randn(6, 2, 8), calibration=[SMALL_AND_LARGE], slower="keep"
    )
    assert kernels(made) == [f"aten.quantized_lstm({FLOAT16})"]


def test_weights_beyond_float16_stay_float_with_the_figures() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), with_large_weights(1e7)).eval()
    x = SMALL_AND_LARGE
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8))
    made = backquant.quantize(model, x, calibration=[x], slower="keep")
    [row] = [row for row in made.report.rows if row.operator == "LSTM"]
    assert not row.quantized
    [reason] = row.reasons
    assert reason.rule == "noise-of-weights"
    assert reason.asked.startswith("its output over the noise of its kernel: int8 ")
    assert reason.admitted == "at least 20 dB"
    assert "set_module_name('1', float16_dynamic_qconfig)" in reason.fix


def test_a_mapping_decides() -> None:
    x = torch.randn(6, 2, 8)
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    made = backquant.quantize(with_large_weights(1e3), x, qconfig_mapping=mapping)
    assert kernels(made) == [f"aten.quantized_lstm({INT8})"]


def test_explain_says_the_same() -> None:
    report = backquant.explain(Tagger(), torch.randn(2, 8, 12))
    assert [row.outcome for row in report.rows if row.operator == "LSTM"] == ["quantized"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_backend_without_an_engine_has_what_its_runtime_has(kind: type[nn.RNNBase]) -> None:
    x = torch.randn(2, 8, 12)
    outcome = "quantized" if kind is nn.LSTM else "float"
    report = backquant.explain(Tagger(kind), x, backend="onnxruntime")
    assert [row.outcome for row in report.rows if row.operator == kind.__name__] == [outcome]
    report = backquant.explain(Tagger(kind), x, backend="openvino")
    assert [row.outcome for row in report.rows if row.operator == kind.__name__] == ["float"]


def test_a_runtime_without_float16_leaves_large_weights_in_float() -> None:
    model = nn.Sequential(nn.Linear(8, 8), with_large_weights(1e3)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(8))
    made = backquant.quantize(model, calibration=[SMALL_AND_LARGE], backend="onnxruntime")
    [row] = [row for row in made.report.rows if row.operator == "LSTM"]
    [reason] = row.reasons
    assert reason.rule == "noise-of-weights"
    assert "int8" in reason.asked
    assert "float16" not in reason.asked + reason.fix
    assert "per_channel_dynamic_qconfig" in reason.fix


class _Padded(nn.Module):
    """Sequences of several lengths as one, which no file of a runtime holds."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 16)
        self.fc = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return self.fc(nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0])[0])


def test_packed_sequences_stay_float_for_a_runtime() -> None:
    inputs = (torch.randn(6, 2, 8), torch.tensor([6, 3]))
    report = backquant.explain(_Padded(), inputs, backend="onnxruntime")
    assert [row.outcome for row in report.rows if row.operator == "LSTM"] == ["float"]


def test_trained_weights() -> None:
    """Resemblyzer's first layer has weights of 61 beside a median of 1.7, for inputs of 1e-10 to 1.7."""
    entry = catalogue()["resemblyzer.VoiceEncoder"]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package about those that it imports
        model = entry.make()
    spectrum = torch.logspace(0, -8, 40)  # of voices: little in the high bands
    batches = [spectrum * torch.randn(2, 60, 40).exp() for _ in range(3)]
    made = backquant.quantize(model, batches[0], calibration=batches[:2], slower="keep")
    inputs = batches[2]
    with torch.no_grad():
        near = torch.cosine_similarity(model(inputs), made(inputs))
        assert near.min() > 0.999
        mapping = QConfigMapping().set_object_type(nn.LSTM, default_dynamic_qconfig)
        other = backquant.quantize(model, batches[0], qconfig_mapping=mapping)
        assert torch.cosine_similarity(model(inputs), other(inputs)).min() < 0.99
    assert any(FLOAT16 in kernel for kernel in kernels(made))


class _Stacked(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(32, 64, num_layers=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(x)[0]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_layers_of_one_module_are_decided_one_by_one(kind: type[nn.Module]) -> None:
    """Large weights on small inputs, in the first layer alone."""
    torch.manual_seed(0)
    model = _Stacked(kind).eval()
    with torch.no_grad():
        model.rnn.weight_ih_l0[:, :4] *= 400
    sizes = torch.tensor([0.0005] * 4 + [1.0] * 27 + [30.0])
    data = [torch.randn(20, 4, 32) * sizes for _ in range(2)]
    found = backquant.quantize(model, calibration=data, slower="keep")
    assert "decided layer by layer: rnn" in found.plan.notes
    kernels = [use.kernel for use in found.kernels]
    assert ["float16" in kernel for kernel in kernels] == [True, False, False]
    wanted, got = model(data[0]).detach(), found(data[0])
    assert 10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum()) > 30
    assert backquant.compare(model, found, data).sqnr > 30  # its float graph is taken apart, too
