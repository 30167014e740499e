"""Integer inputs and outputs: microcontrollers, NPUs, images as a camera gives them (executorch#16244)."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import backquant
from backquant import ConfigError, InputError, PrepareCustomConfig, UsageError
from backquant.api import flow
from backquant.deploy.session import load_exported

HERE = ["x86", "onednn", "fbgemm", "qnnpack", "native"]
FILES = {
    "onnxruntime": "onnx",
    "openvino": "xml",
    "xnnpack": "pte",
    "litert": "tflite",
    "litert_micro": "tflite",
    "tensorrt": "onnx",
}
DATA = [torch.rand(2, 3, 12, 12, generator=torch.Generator().manual_seed(s)) for s in range(6)]


def cnn() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8, 4)).eval()


class Camera(nn.Module):
    """Normalizes images in float, as torchvision's transforms do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = cnn()

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.net((image - 0.45) / 0.22)


class Keyword(nn.Module):
    """A keyword spotter: spectrogram and length in, scores and classes out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.head = nn.Linear(12, 16), nn.Linear(16, 4)

    def forward(self, sound: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = self.head(torch.relu(self.fc(sound)))
        return scores, scores.argmax(-1), length + 1


def quantized(model: nn.Module, **more: Any) -> backquant.QuantizedModel:
    return backquant.quantize(model, calibration=more.pop("data", DATA), slower="keep", **more)


def real(value: torch.Tensor, qparams: Any) -> torch.Tensor:
    return (value.float() - qparams.zero_point) * qparams.scale


def decibels(wanted: torch.Tensor, got: torch.Tensor) -> float:
    wanted = wanted.detach()
    return float(20 * torch.log10(wanted.norm() / (wanted - got).norm()))


def integers(x: torch.Tensor, qparams: Any) -> torch.Tensor:
    steps = torch.round(x / qparams.scale) + qparams.zero_point
    return steps.clamp(qparams.quant_min, qparams.quant_max).to(qparams.dtype)


@pytest.mark.parametrize("backend", [*HERE, *FILES])
def test_integers_go_in_and_come_out(backend: str) -> None:
    model = cnn()
    made = quantized(model, backend=backend, integer_io=True)
    arrives, leaves = made.input_qparams[0], made.output_qparams[0]
    result = made(integers(DATA[0], arrives))
    assert result.dtype == leaves.dtype
    assert decibels(model(DATA[0]), real(result, leaves)) > 30
    assert torch.equal(made(DATA[0]), result)  # floats are brought to integers
    assert f"takes {str(arrives.dtype)[6:]} from" in str(made.report)
    is_signed = backend in ("xnnpack", "litert", "litert_micro", "tensorrt")
    assert (arrives.dtype == torch.int8) == is_signed  # that of the activations


@pytest.mark.parametrize("backend", FILES)
def test_files_take_and_give_integers(backend: str, tmp_path: Path) -> None:
    model = cnn()
    path = tmp_path / f"model.{FILES[backend]}"
    made = quantized(model, backend=backend)
    target = "tensorrt" if backend == "tensorrt" else None
    exported = backquant.export(made, path, to=target, integer_io=True)
    arrives, leaves = exported.edges["input"], exported.edges["output 0"]
    beside = json.loads((tmp_path / "model.qparams.json").read_text())
    assert beside["input"]["scale"] == arrives.scale and beside["output 0"]["dtype"] in str(leaves)
    assert path.with_suffix(".qparams.json") in exported.files
    if backend == "tensorrt":
        return
    x = integers(DATA[0], arrives)
    [result] = map(torch.as_tensor, load_exported(path, 1).run([x.numpy()]))
    assert result.dtype == leaves.dtype
    assert decibels(model(DATA[0]), real(result, leaves)) > 30


class Residual(nn.Module):
    """The first of two convolutions reads the input, and what joins their result with it does."""

    def __init__(self, join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
        self.join = join

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.join(input, self.second(torch.relu(self.first(input))))


JOINS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "x + y": lambda x, y: x + y,
    "x * y": lambda x, y: x * y,
    "cat": lambda x, y: torch.cat([x, y], 1),
    "pool": lambda x, y: nn.functional.max_pool2d(x, 3, 1, 1) + y,
    "twice": lambda x, y: x + (x + y),
}


@pytest.mark.parametrize("wish", [True, {"input": True}], ids=["both", "input"])
@pytest.mark.parametrize("join", JOINS)
def test_operators_that_share_an_integer_input(join: str, wish: Any, tmp_path: Path) -> None:
    """XNNPACK's kernels were one partition that reads itself (``CycleError``)."""
    model, path = Residual(JOINS[join]).eval(), tmp_path / "model.pte"
    exported = backquant.export(quantized(model, backend="executorch"), path, integer_io=wish)
    x = integers(DATA[0], exported.edges["input"])
    [result] = map(torch.as_tensor, load_exported(path, 1).run([x.numpy()]))
    if wish is True:
        result = real(result, exported.edges["output 0"])
    assert decibels(model(DATA[0]), result) > 30


@pytest.mark.parametrize("backend", ["litert", "litert_micro"])
def test_a_tflite_has_integers_at_its_edges(backend: str, tmp_path: Path) -> None:
    from ai_edge_litert.interpreter import Interpreter

    made = quantized(cnn(), backend=backend)
    exported = backquant.export(made, tmp_path / "model.tflite", integer_io=True)
    interpreter = Interpreter(model_path=str(tmp_path / "model.tflite"))
    [arrives], [leaves] = interpreter.get_input_details(), interpreter.get_output_details()
    assert arrives["dtype"] == leaves["dtype"] == np.int8
    for detail, name in ((arrives, "input"), (leaves, "output 0")):
        assert detail["quantization"] == pytest.approx(exported.edges[name].args)


@pytest.mark.parametrize("edges", [True, {"input": True}, {"input": (1 / 255, 0, torch.uint8)}])
def test_a_model_that_is_large_enough_to_be_timed(
    edges: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "TIMING", replace(flow.TIMING, least=0))
    torch.manual_seed(0)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(32, 10)]
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), *head).eval()
    images = [torch.rand(8, 3, 16, 16) for _ in range(4)]
    quantized = backquant.quantize(model, images, backend="x86", integer_io=edges)
    assert any(note.startswith("not timed, since inputs") for note in quantized.plan.notes)


@pytest.mark.parametrize("backend", [*HERE, "onnxruntime", "xnnpack", "litert"])
def test_images_of_a_camera(backend: str) -> None:
    """Bytes from 0 to 255 for what the model was trained on as 0 to 1."""
    model, wish = Camera().eval(), {"image": (1 / 255, 0, torch.uint8)}
    made = quantized(model, backend=backend, integer_io=wish)
    image = (DATA[0] * 255).round().to(torch.uint8)
    assert decibels(model(image / 255), made(image)) > 30
    assert made.input_qparams[0].args == (1 / 255, 0)


@pytest.mark.parametrize("backend", ["xnnpack", "litert", "onnxruntime"])
def test_a_dtype_of_ones_own(backend: str) -> None:
    model = cnn()
    for dtype in (torch.uint8, torch.int8):
        made = quantized(model, backend=backend, integer_io={"input": dtype})
        arrives = made.input_qparams[0]
        assert arrives.dtype == dtype
        assert decibels(model(DATA[0]), made(integers(DATA[0], arrives))) > 30


def test_bytes_are_divided_in_the_model() -> None:
    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = cnn()

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            return self.net(image.float() / 255)

    model, data = Divided().eval(), [(x * 255).to(torch.uint8) for x in DATA]
    for backend in ("x86", "onnxruntime", "litert"):
        made = quantized(model, backend=backend, data=data, integer_io={0: True})
        result = real(made(data[0]), made.output_qparams[0])
        assert decibels(model(data[0]), result) > 30


def test_other_inputs_and_outputs_stay_as_they_are() -> None:
    model, data = Keyword().eval(), [(torch.randn(2, 12), torch.tensor([3, 5])) for _ in range(4)]
    made = quantized(model, data=data, backend="onnxruntime", integer_io={"sound": True, 0: True})
    scores, best, longer = made(*data[0])
    assert scores.dtype == torch.uint8 and best.dtype == longer.dtype == torch.int64
    assert list(made.input_qparams) == [0]


@pytest.mark.parametrize("recipe", ["default", "none", "better"])
def test_recipes_see_floats(recipe: str) -> None:
    made = quantized(cnn(), backend="xnnpack", integer_io=True, recipe=recipe)
    wanted = quantized(cnn(), backend="xnnpack", recipe=recipe)
    result = real(made(DATA[0]), made.output_qparams[0])
    assert decibels(wanted(DATA[0]), result) > 40


def test_it_is_what_the_custom_config_of_torch_asks_for() -> None:
    custom = (
        PrepareCustomConfig().set_input_quantized_indexes([0]).set_output_quantized_indexes([0])
    )
    made = quantized(cnn(), backend="xnnpack", prepare_custom_config=custom)
    other = quantized(cnn(), backend="xnnpack", integer_io=True)
    assert made.input_qparams == other.input_qparams
    assert torch.equal(made(DATA[0]), other(DATA[0]))
    with pytest.raises(UsageError, match="both say"):
        quantized(cnn(), prepare_custom_config=custom, integer_io=True)


def test_saved_compared_exported(tmp_path: Path) -> None:
    model = cnn()
    made = quantized(model, backend="onnxruntime", integer_io=True)
    backquant.save(made, tmp_path / "model.bq")
    again = backquant.load(tmp_path / "model.bq")
    assert again.input_qparams == made.input_qparams
    assert torch.equal(again(DATA[0]), made(DATA[0]))
    assert backquant.compare(model, made, DATA).outputs[0].sqnr > 30
    exported = backquant.export(again, tmp_path / "model.onnx")
    assert exported.edges["input"] == made.input_qparams[0]
    assert all("accuracy lost on this CPU" in note for note in exported.notes)


def test_an_exported_model_takes_integers() -> None:
    made = quantized(cnn(), backend="x86", integer_io=True, capture="export")
    x = integers(DATA[0], made.input_qparams[0])
    assert torch.equal(made(x), made(DATA[0]))


def test_with_qat_and_a_reference_model(tmp_path: Path) -> None:
    mapping = backquant.get_default_qat_qconfig_mapping("onnxruntime")
    config = backquant.get_backend_config("onnxruntime")
    prepared = backquant.prepare_qat_fx(cnn().train(), mapping, DATA[0], backend_config=config)
    prepared(DATA[0]).sum().backward()
    reference = backquant.convert_to_reference_fx(prepared.eval(), dialect="decomposed")
    path = tmp_path / "model.onnx"
    with pytest.raises(
        ConfigError, match="output 0 cannot be integers"
    ):  # nothing rounds it in training
        backquant.export(reference, path, example_inputs=DATA[0], integer_io=True)
    wish = {"input": True}
    exported = backquant.export(reference, path, example_inputs=DATA[0], integer_io=wish)
    assert list(exported.edges) == ["input"]


def _softmax() -> nn.Module:
    return nn.Sequential(cnn(), nn.Softplus()).eval()


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "float-input": (
        lambda: quantized(Camera().eval(), backend="x86", integer_io={"image": True}),
        ConfigError,
    ),
    "float-output": (lambda: quantized(_softmax(), integer_io=True), ConfigError),
    "no-input": (lambda: quantized(cnn(), integer_io={"imput": True}), UsageError),
    "no-output": (lambda: quantized(cnn(), integer_io={3: True}), ConfigError),
    "no-wish": (lambda: quantized(cnn(), integer_io={"input": "int8"}), UsageError),
    "int8-for-all": (lambda: quantized(cnn(), integer_io="int8"), UsageError),
    "twice": (
        lambda: backquant.export(
            quantized(cnn(), backend="onnxruntime", integer_io=True), "model.onnx", integer_io=True
        ),
        UsageError,
    ),
    "search": (
        lambda: backquant.search(
            cnn(),
            data=DATA,
            budget={"min_sqnr": 30},
            prepare_custom_config=PrepareCustomConfig().set_input_quantized_indexes([0]),
        ),
        UsageError,
    ),
    "checkpoint": (
        lambda: backquant.export(
            backquant.quantize(
                nn.Sequential(nn.Linear(64, 64)),
                torch.randn(1, 64),
                backend="gguf",
                weights="int8",
                group_size=32,
            ),
            "model.gguf",
            integer_io=True,
        ),
        UsageError,
    ),
    "other-integers": (
        lambda: quantized(cnn(), integer_io=True)(DATA[0].to(torch.int8)),
        InputError,
    ),
    "NaN": (lambda: quantized(cnn(), integer_io=True)(DATA[0] * torch.nan), InputError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, snapshot: Callable[..., None]) -> None:
    call, kind = REFUSED[name]
    with pytest.raises(kind) as refused:
        call()
    snapshot(name, refused.value)


def test_the_fixes_work() -> None:
    """What ``float-input`` and ``float-output`` print."""
    for name, model in (("float-input", Camera().eval()), ("float-output", _softmax())):
        with pytest.raises(ConfigError) as refused:
            REFUSED[name][0]()
        assert refused.value.fix is not None
        wish = refused.value.fix.partition("#")[0].strip().removeprefix("integer_io=")
        made = quantized(model, integer_io=eval(wish, {"torch": torch}))
        assert decibels(model(DATA[0]), made(DATA[0])) > 30


def _written(model: Any, **more: Any) -> None:
    """The integers that it takes and gives are kept."""
    with tempfile.TemporaryDirectory() as folder:
        backquant.export(model, Path(folder) / "model.onnx", **more)


BY_HAND = {
    "input.to(torch.uint8)": lambda *_: quantized(cnn(), integer_io=True)(DATA[0].to(torch.uint8)),
    "model(torch.nan_to_num": lambda *_: quantized(cnn(), integer_io=True)(
        torch.nan_to_num(DATA[0] * torch.nan)
    ),
    "integer_io=None": lambda *_: _written(
        quantized(cnn(), backend="onnxruntime", integer_io=True), integer_io=None
    ),
}
