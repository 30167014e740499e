"""Outputs of files: under the keys of the model's dicts and records, and without those that are ``None``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import backquant


class Found(NamedTuple):
    classes: torch.Tensor
    boxes: list[torch.Tensor]


class Heads(nn.Module):
    """Returns what ``make`` makes of the classes and the boxes."""

    def __init__(self, make: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.classes, self.boxes = nn.Conv2d(3, 8, 3), nn.Linear(8, 4), nn.Linear(8, 2)
        self.make = make

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.relu(self.conv(x)).mean((2, 3))
        return self.make(self.classes(y), self.boxes(y))


#: What a model returns, and the names that files have for it; ``None``: any other.
RETURNED: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], list[str | None]]] = {
    "dict": (lambda a, b: {"classes": a, "boxes": b}, ["classes", "boxes"]),
    "namedtuple": (lambda a, b: Found(a, [b, a + 1]), ["classes", "boxes.0", "boxes.1"]),
    "tensor": (lambda a, b: a + b.sum(), ["output"]),
    "tuple": (lambda a, b: (a, b), ["output_0", "output_1"]),
    "nested": (lambda a, b: (a, {"b": {"c": b}}), ["output_0", "1.b.c"]),
    "key of an operator": (lambda a, b: {"relu": a, "conv2d": torch.relu(b)}, ["relu", "conv2d"]),
    "key of the input": (lambda a, b: {"x": a, "y": b}, [None, "y"]),
    "one key twice": (lambda a, b: {"a.b": a, "a": {"b": b}}, ["output_0", "output_1"]),
    "None": (lambda a, b: (None, a, {"loss": None, "boxes": b}), ["output_1", "2.boxes"]),
    "None alone": (lambda a, b: (a, None), ["output_0"]),
}


def _onnx_outputs(path: Path) -> list[str]:
    onnx = pytest.importorskip("onnx")
    return [value.name for value in onnx.load(path).graph.output]


def _litert_outputs(path: Path) -> list[str]:
    interpreter = pytest.importorskip("ai_edge_litert.interpreter").Interpreter(str(path))
    runner = interpreter.get_signature_runner()
    places = {one["index"]: name for name, one in runner.get_output_details().items()}
    return [places[one["index"]] for one in interpreter.get_output_details()]


READ: dict[str, tuple[str, Callable[[Path], list[str]]]] = {
    "onnxruntime": ("m.onnx", _onnx_outputs),
    "openvino": ("m.onnx", _onnx_outputs),
    "litert": ("m.tflite", _litert_outputs),
}


@pytest.mark.parametrize("returned", RETURNED)
@pytest.mark.parametrize("backend", READ)
def test_outputs_have_the_keys_of_the_model(backend: str, returned: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, wanted = RETURNED[returned]
    file, names_in = READ[backend]
    quantized = backquant.quantize(
        Heads(make).eval(), backend=backend, calibration=[torch.rand(2, 3, 8, 8)]
    )
    backquant.export(quantized, tmp_path / file)
    names = names_in(tmp_path / file)
    assert len({*names}) == len(wanted)
    pairs = zip(names, wanted, strict=True)
    assert all(key in (None, name) for name, key in pairs), names


def test_a_program_of_executorch_leaves_none_out(tmp_path: Path) -> None:
    """Its dequantized value is read by the graph's output, which has no value of its own."""
    pytest.importorskip("executorch")
    torch.manual_seed(0)
    model = Heads(RETURNED["None"][0]).eval()
    quantized = backquant.quantize(
        model, backend="executorch", calibration=[torch.rand(2, 3, 8, 8)]
    )
    assert backquant.export(quantized, tmp_path / "m.pte").integer_share is not None


def test_axes_of_the_one_input_need_no_name(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = Heads(RETURNED["dict"][0]).eval()
    quantized = backquant.quantize(
        model, backend="onnxruntime", calibration=[torch.rand(2, 3, 8, 8)]
    )
    backquant.export(quantized, tmp_path / "m.onnx", dynamic_shapes={0: "batch"})
    [given] = onnx.load(tmp_path / "m.onnx").graph.input
    assert given.type.tensor_type.shape.dim[0].dim_param == "batch"
