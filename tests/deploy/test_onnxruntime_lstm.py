"""``nn.LSTM`` in ONNX files: what ONNX Runtime makes of it, and what it gives."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from benchmarks.stock.catalogue import catalogue
from torch import nn
from torch.utils._pytree import tree_leaves

import backquant
from backquant import QConfigMapping, default_dynamic_qconfig
from backquant.deploy import Exported
from backquant.errors import CoverageError
from backquant.nn.quantized.reference.stepped import lstm_step_by_step
from backquant.qconfig import per_channel_dynamic_qconfig
from backquant.runtime import QuantizedModel

STEPS, BATCH, FEATURES, HIDDEN = 12, 3, 16, 24


def run(path: Path, *inputs: torch.Tensor) -> list[torch.Tensor]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = {i.name: x.numpy() for i, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(found) for found in session.run(None, feed)]


def decibels(wanted: Any, found: Any) -> float:
    """Of the noisiest tensor."""
    pairs = zip(tree_leaves(wanted), tree_leaves(found), strict=True)
    return min(
        float(10 * torch.log10(one.square().sum() / (one - two).square().sum()))
        for one, two in pairs
    )


def kernels(exported: Exported) -> list[str]:
    return [use.kernel for use in exported.kernels if "LSTM" in use.kernel]


class Recurrent(nn.Module):
    """All results of a layer, which may be given its state."""

    def __init__(self, *, with_state: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.with_state = with_state
        self.rnn = nn.LSTM(FEATURES, HIDDEN, **options)

    def forward(self, x: torch.Tensor, h: Any = None, c: Any = None) -> Any:
        found, (hidden, cell) = self.rnn(x, (h, c)) if self.with_state else self.rnn(x)
        return found, hidden, cell


def dynamic(model: nn.Module, inputs: Any, qconfig: Any = per_channel_dynamic_qconfig) -> Any:
    mapping = QConfigMapping().set_global(qconfig)
    return backquant.quantize(model.eval(), inputs, backend="onnxruntime", qconfig_mapping=mapping)


OPTIONS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "three layers": {"num_layers": 3, "dropout": 0.5},
    "two directions": {"bidirectional": True},
    "two layers of two directions, batch first": {
        "num_layers": 2,
        "bidirectional": True,
        "batch_first": True,
    },
    "no biases": {"bias": False},
}


@pytest.mark.parametrize("with_state", [False, True], ids=["zeros", "state"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_every_layer_runs_on_integers(options: Any, with_state: bool, tmp_path: Path) -> None:
    model = Recurrent(with_state=with_state, **options).eval()
    states = model.rnn.num_layers * (2 if model.rnn.bidirectional else 1)
    sizes = (BATCH, STEPS) if model.rnn.batch_first else (STEPS, BATCH)
    inputs = [torch.randn(*sizes, FEATURES)]
    if with_state:
        inputs += [torch.randn(states, BATCH, HIDDEN) for _ in range(2)]
    quantized = dynamic(model, tuple(inputs))
    path = tmp_path / "m.onnx"
    exported = backquant.export(quantized, path)
    assert exported.integer_share == 1.0
    assert kernels(exported) == ["DynamicQuantizeLSTM"] * model.rnn.num_layers
    found = run(path, *inputs)
    with torch.no_grad():
        assert decibels(model(*inputs), found) > 34
        assert decibels(quantized(*inputs), found) > 40  # it rounds the hidden state, too
        reference, state = quantized.graph_module.rnn, tuple(inputs[1:]) or None
        out, last = lstm_step_by_step(reference, inputs[0], state)
        assert decibels((out, *last), found) > 45


def test_a_scale_for_the_whole_weight(tmp_path: Path) -> None:
    model, x = Recurrent(bidirectional=True).eval(), torch.randn(STEPS, BATCH, FEATURES)
    quantized = dynamic(model, x, default_dynamic_qconfig)
    exported = backquant.export(quantized, tmp_path / "m.onnx")
    assert kernels(exported) == ["DynamicQuantizeLSTM"]
    with torch.no_grad():
        assert decibels(model(x), run(exported.path, x)) > 34


@pytest.mark.parametrize(
    ("capture", "sizes"), [("trace", (STEPS,)), ("trace", (STEPS, 1)), ("export", (STEPS, BATCH))]
)
def test_one_sequence_and_both_captures(
    capture: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    model, x = Recurrent().eval(), torch.randn(*sizes, FEATURES)
    made = backquant.quantize(
        model, x, calibration=[x], backend="onnxruntime", capture=capture, require=1.0
    )
    exported = backquant.export(made, tmp_path / "m.onnx")
    with torch.no_grad():
        assert decibels(model(x), run(exported.path, x)) > 34


class Tagger(nn.Module):
    """A layer that is called twice, the second time with its state, between static operators."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(8, FEATURES, 3, padding=1)
        self.rnn = nn.LSTM(FEATURES, FEATURES, batch_first=True)
        self.fc = nn.Linear(FEATURES, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found, state = self.rnn(torch.relu(self.conv(x)).transpose(1, 2))
        return self.fc(self.rnn(found, state)[0])


def test_among_static_operators_by_default_saved_and_loaded(tmp_path: Path) -> None:
    model, x = Tagger().eval(), torch.randn(4, 8, STEPS)
    made = backquant.quantize(model, calibration=[x], backend="onnxruntime", require=1.0)
    assert "recurrent, quantized at each call by default on onnxruntime: rnn" in made.plan.notes
    backquant.save(made, tmp_path / "m.bq")
    loaded = backquant.load(tmp_path / "m.bq")
    assert torch.equal(loaded(x), made(x))
    shapes = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}
    exported = backquant.export(loaded, tmp_path / "m.onnx", dynamic_shapes=shapes)
    assert kernels(exported) == ["DynamicQuantizeLSTM"] * 2
    assert exported.integer_share == 1.0
    for batch in (4, 7):
        x = torch.randn(batch, 8, STEPS)
        [found] = run(exported.path, x)
        assert decibels(made(x), found) > 34


def test_standard_operators_alone_keep_the_layer_as_the_reference_model_has_it(
    tmp_path: Path,
) -> None:
    model = Recurrent(num_layers=2, bidirectional=True).eval()
    x = torch.randn(STEPS, BATCH, FEATURES)
    quantized = dynamic(model, x)
    exported = backquant.export(quantized, tmp_path / "m.onnx", to="qdq-onnx")
    [use] = [use for use in exported.kernels if "LSTM" in use.kernel]
    assert "DynamicQuantizeLSTM" not in use.kernel
    assert exported.means == "between quantize and dequantize nodes"
    graph = onnx.load(str(exported.path)).graph
    assert {node.domain for node in graph.node} == {""}
    with torch.no_grad():
        assert decibels(quantized(x), run(exported.path, x)) > 80


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
def test_projections_are_refused_with_the_reason() -> None:
    x = torch.randn(STEPS, BATCH, FEATURES)
    with pytest.raises(CoverageError, match=r"requested proj_size 8, supported proj_size = 0"):
        dynamic(Recurrent(proj_size=8), x)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTMCell, nn.GRUCell])
def test_others_have_no_integer_operator(kind: type[nn.Module]) -> None:
    names = [schema.name for schema in _contrib_operators()]
    assert [n for n in names if any(word in n for word in ("GRU", "Cell"))] == []
    x = torch.randn(BATCH, FEATURES)
    with pytest.raises(CoverageError, match=rf"no entry for {kind.__name__}; .*LSTM"):
        dynamic(kind(FEATURES, HIDDEN), x)


def _contrib_operators() -> list[Any]:
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    schemas = state.get_all_operator_schema()
    return [schema for schema in schemas if schema.domain == "com.microsoft"]


def trained(name: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package about those that it imports
        return catalogue()[name].make()


def test_trained_weights_of_a_speaker_encoder(tmp_path: Path) -> None:
    """Its first layer has weights of 61 beside a median of 1.7: it stays float, the others do not."""
    model = trained("resemblyzer.VoiceEncoder")
    torch.manual_seed(0)
    spectrum = torch.logspace(0, -8, 40)  # of voices: little in the high bands
    batches = [spectrum * torch.randn(2, 60, 40).exp() for _ in range(3)]
    made: QuantizedModel = backquant.quantize(
        model, batches[0], calibration=batches[:2], backend="onnxruntime"
    )
    outcomes = {row.module_path: row.outcome for row in made.report.rows if row.operator == "LSTM"}
    assert outcomes == {
        "lstm_layer_0": "float",
        "lstm_layer_1": "quantized",
        "lstm_layer_2": "quantized",
    }
    exported = backquant.export(made, tmp_path / "m.onnx")
    assert sorted(kernels(exported)) == ["DynamicQuantizeLSTM"] * 2 + ["LSTM"]
    with torch.no_grad():
        [found] = run(exported.path, batches[2])
        assert torch.cosine_similarity(model(batches[2]), found).min() > 0.99
