"""What TensorRT's inspector says of an engine, and what happens where TensorRT refuses a file."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir
import pytest
import torch
from benchmarks.stock.images import torchvision_model

import backquant
from backquant.deploy.onnx.exporter import origins_of
from backquant.deploy.tensorrt import target as target_module
from backquant.deploy.tensorrt.target import BuiltEngine, inspected_kernels
from backquant.errors import EngineError, ExportError

#: What TensorRT 8.6.0 said of the export of torchvision's ResNet-18 on an NVIDIA H200.
LAYERS = Path(__file__).parent / "resnet18_layers.json"


def resnet18() -> tuple[torch.nn.Module, torch.nn.Module]:
    """The model, and what is quantized of it."""
    torch.manual_seed(0)
    data = torch.randn(1, 3, 64, 64)
    model = torchvision_model("resnet18").eval()
    for (
        part
    ) in model.modules():  # the exporter makes convolutions without a bias of those where it is 0
        if isinstance(part, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(part.bias)
    made = backquant.quantize(model, data, backend="tensorrt", calibration=[data], slower="keep")
    return model, made


def test_the_layers_of_resnet18_are_found_in_its_graph(tmp_path: Path) -> None:
    model, made = resnet18()
    backquant.export(made, tmp_path / "m.onnx", to="tensorrt")
    origins = origins_of(onnx_ir.load(tmp_path / "m.onnx"))
    found = inspected_kernels(LAYERS.read_text(), origins)
    assert all(use.integer and use.dtype == "int8" for use in found)
    named = {node for use in found for node in use.nodes}
    layers = {name for name, part in model.named_modules() if hasattr(part, "weight")}
    weighted = {name.replace(".", "_") for name in layers if "bn" not in name}
    assert {n for n in weighted if not n.endswith("downsample_1")} <= named
    assert {"maxpool", "avgpool", "add", "add_7", "layer4_1_relu_1"} <= named


class _Recorded:
    """An engine whose layers are those of the record, without the last: ``fc`` is in none."""

    def __init__(self, path: Path, level: int) -> None:
        assert path.is_file() and level == 2

    def kernels(self, origins: dict[str, str]) -> Any:
        return tuple(
            k for k in inspected_kernels(LAYERS.read_text(), origins) if "fc" not in k.nodes
        )


def test_an_export_tells_what_the_engine_computes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(target_module, "finds_gpu", lambda: True)
    monkeypatch.setattr(target_module, "version", lambda: "tensorrt 8.6.0")
    monkeypatch.setattr(target_module, "BuiltEngine", _Recorded)
    _, made = resnet18()
    told = backquant.export(
        made, tmp_path / "m.onnx", to="tensorrt", require=0.9, options={"level": 2}
    )
    assert told.runtime == "tensorrt 8.6.0"
    assert (told.integer, told.expected) == (31, 32)
    assert [reason.node for reason in told.left_in_float] == ["fc"]


@pytest.mark.parametrize(
    ("formats", "dtype", "integer"),
    [
        (["Thirty-two wide channel vectorized row major Int8 format"], "int8", True),
        (["Row major linear FP8"], "float8", True),
        (["Row major linear FP32"], "float32", False),
        (["Row major Int8 format", "Row major linear FP32"], "float32", False),
        (["Row major linear FP16 format"], "float16", False),
    ],
)
def test_a_layer_computes_in_what_all_that_it_reads_is(
    formats: list[str], dtype: str, integer: bool
) -> None:
    reads = ", ".join(f'{{"Format/Datatype": "{each}"}}' for each in formats)
    told = f'{{"Layers": [{{"Name": "a/Add", "LayerType": "PointWiseV2", "Inputs": [{reads}]}}]}}'
    [use] = inspected_kernels(told, {"a/Add": "a"})
    assert (use.dtype, use.integer, use.nodes) == (dtype, integer, ("a",))


def test_what_only_moves_values_is_no_kernel() -> None:
    told = '{"Layers": [{"Name": "q", "LayerType": "Reformat", "Inputs": []}, "a name alone"]}'
    assert inspected_kernels(told, {}) == ()


class _Refusing:
    """As much of the package as a refusal needs: its parser reads nothing, and says why."""

    class ILogger:
        ERROR, INTERNAL_ERROR = "error", "internal"

    class NetworkDefinitionCreationFlag:
        EXPLICIT_BATCH = 0

    def __init__(self, has_gpu: bool) -> None:
        self._has_gpu = has_gpu

    def Builder(self, logger: Any) -> Any:
        if not self._has_gpu:
            raise TypeError("pybind11::init(): factory function returned nullptr")
        return SimpleNamespace(create_network=lambda flags: flags)

    def OnnxParser(self, network: Any, logger: Any) -> Any:
        said = SimpleNamespace(desc=lambda: "Assertion failed: shiftIsAllZeros")
        return SimpleNamespace(
            parse_from_file=lambda path: False, num_errors=1, get_error=lambda index: said
        )


def test_the_words_of_a_refusal_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", _Refusing(has_gpu=True))
    with pytest.raises(
        ExportError, match="parser refuses the file: Assertion failed: shiftIsAllZeros"
    ):
        BuiltEngine(tmp_path / "m.onnx")


def test_without_a_gpu_no_engine_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", _Refusing(has_gpu=False))
    with pytest.raises(EngineError, match="TensorRT finds no GPU"):
        BuiltEngine(tmp_path / "m.onnx")


def test_without_a_gpu_the_file_speaks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(target_module, "finds_gpu", lambda: False)
    layer, data = torch.nn.Sequential(torch.nn.Linear(8, 4)), torch.randn(2, 8)
    made = backquant.quantize(layer, data, backend="tensorrt", calibration=[data], slower="keep")
    told = backquant.export(made, tmp_path / "m.onnx", to="tensorrt")
    assert told.runtime == "TensorRT, by the file's quantization"
