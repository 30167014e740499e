"""Bags of embeddings, and equations that are no products, give the same numbers in every runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import backquant
from backquant.deploy.program import decomposed_for_runtimes, export_program
from backquant.errors import ExportError

WORDS, OFFSETS = torch.tensor([1, 4, 4, 0, 7, 2]), torch.tensor([0, 2, 2, 5])  # the second is empty


class Bags(nn.Module):
    def __init__(self, mode: str, padding: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(9, 8, mode=mode, padding_idx=padding)
        self.last = nn.Linear(8, 4)

    def forward(self, words: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.last(self.bag(words, offsets))


@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_decomposed_they_compute_the_same(mode: str, padding: int | None) -> None:
    model = Bags(mode, padding).eval()
    whole = export_program(torch.fx.symbolic_trace(model), (WORDS, OFFSETS), {}, None)
    made = decomposed_for_runtimes(whole)
    assert made is not whole
    assert not any("embedding_bag" in str(node.target) for node in made.exported.graph.nodes)
    assert set(made.origins.values()) == set(whole.origins.values())
    found = made.exported.module()(WORDS, OFFSETS)
    torch.testing.assert_close(found, model(WORDS, OFFSETS))


def test_openvino_takes_them(tmp_path: Path) -> None:
    import openvino

    model = Bags("sum").eval()
    batches = [(WORDS, OFFSETS)]
    quantized = backquant.quantize(model, batches[0], backend="openvino", calibration=batches)
    backquant.export(quantized, tmp_path / "m.xml", require=0.0)
    compiled = openvino.Core().compile_model(
        str(tmp_path / "m.xml"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    found = torch.from_numpy(compiled([WORDS.numpy(), OFFSETS.numpy()])[0])
    assert torch.allclose(found, quantized(WORDS, OFFSETS), atol=0.05)


class Equation(nn.Module):
    """As in linear attention: without a sum, or of three operands."""

    def __init__(self, operands: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.last = nn.Linear(8, 8), nn.Linear(8 if operands == 2 else 6, 8)
        self.operands = operands

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x)
        weights = 1 / (1 + y.square().sum(-1))
        if self.operands == 2:
            return self.last(torch.einsum("...nd,...n->...nd", y, weights))
        inner = torch.einsum("...nd,...ne->...de", y, x[..., :6])
        return self.last(torch.einsum("...de,...nd,...n->...ne", inner, y, weights))


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("operands", [2, 3])
def test_equations(operands: int, backend: str, tmp_path: Path) -> None:
    model, x = Equation(operands).eval(), torch.randn(1, 2, 12, 8)
    made = backquant.quantize(model, x, backend=backend, calibration=[x], slower="keep")
    path = tmp_path / ("m.xml" if backend == "openvino" else "m.onnx")
    exported = backquant.export(made, path, example_inputs=x)
    assert exported.integer == exported.expected >= 2
    found = torch.from_numpy(_run(path, x))
    assert torch.allclose(found, made(x), atol=0.05 * float(made(x).abs().max()))


def _run(path: Path, x: torch.Tensor) -> Any:
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path))
        return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    import openvino

    hints = {"INFERENCE_PRECISION_HINT": "f32"}
    return openvino.Core().compile_model(str(path), "CPU", hints)([x.numpy()])[0]


class Joins(nn.Module):
    def __init__(self, join: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.join, self.fc = join, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.join([self.fc(x), x])


@pytest.mark.parametrize("join", [torch.column_stack, torch.hstack, torch.vstack, torch.dstack])
def test_joins_of_lists(join: Any, tmp_path: Path) -> None:
    model, x = Joins(join).eval(), torch.randn(4, 8)
    made = backquant.quantize(model, x, backend="openvino", calibration=[x], slower="keep")
    backquant.export(made, tmp_path / "m.xml", example_inputs=x)
    assert torch.allclose(torch.from_numpy(_run(tmp_path / "m.xml", x)), made(x), atol=0.05)


class Projected(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.rnn = nn.Linear(8, 8), nn.LSTM(8, 12, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(self.fc(x))[0]


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime"])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True, "bias": False}], ids=["one", "four"]
)
def test_lstm_with_projections(options: Any, backend: str, tmp_path: Path) -> None:
    model, x = Projected(proj_size=4, **options).eval(), torch.randn(2, 5, 8)
    made = backquant.quantize(model, x, backend=backend, calibration=[x], slower="keep")
    path = tmp_path / ("m.xml" if backend == "openvino" else "m.onnx")
    backquant.export(made, path, example_inputs=x)
    assert torch.allclose(torch.from_numpy(_run(path, x)), made(x), atol=0.02)


def test_lstm_with_projections_of_any_length(tmp_path: Path) -> None:
    model, x = Projected(proj_size=4).eval(), torch.randn(2, 5, 8)
    made = backquant.quantize(model, x, backend="onnxruntime", calibration=[x], slower="keep")
    with pytest.raises(ExportError, match="fixes the dynamic size 'length' to 5"):
        backquant.export(made, tmp_path / "m.onnx", dynamic_shapes={"x": {1: "length"}})


class Packed(Projected):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        packed = pack_padded_sequence(self.fc(x), lengths, True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], True)[0]


def test_packed_sequences(tmp_path: Path, snapshot: Callable[..., None]) -> None:
    given = (torch.randn(2, 5, 8), torch.tensor([3, 5]))
    made = backquant.quantize(
        Packed().eval(), given, backend="onnxruntime", calibration=[given], slower="keep"
    )
    with pytest.raises(ExportError) as caught:
        backquant.export(made, tmp_path / "m.onnx")
    snapshot("packed", caught.value)
