"""What an export is refused for, before anything is written. The texts are in ``messages``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant import BackquantError
from backquant.pipeline.capture import Capturing

X = torch.randn(2, 4)


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


def _ready() -> nn.Module:
    mapping, backend = (
        get("onnxruntime") for get in (backquant.default_mapping, backquant.get_backend_config)
    )
    prepared = backquant.prepare_fx(_net(), mapping, (X,), backend_config=backend)
    prepared(X)
    return prepared


FIX_NAMES = {"x": X, "model": _net(), "calibration": [X], "prepared": _ready()}
FIX_NAMES |= {"one_batch_of_real_inputs": (X,)}


def _quantized(backend: str = "onnxruntime") -> Any:
    return backquant.quantize(_net(), X, backend=backend, calibration=[X])


def _torch_dialect() -> nn.Module:
    mapping = backquant.get_default_qconfig_mapping("onnxruntime")
    backend = backquant.get_backend_config("onnxruntime")
    prepared = backquant.prepare_fx(_net(), mapping, (X,), backend_config=backend)
    prepared(X)
    return backquant.convert_to_reference_fx(prepared, backend_config=backend)


def _on_meta() -> nn.Module:
    quantized = _quantized()
    quantized.graph_module.register_buffer("elsewhere", torch.empty(1, device="meta"))
    return quantized


def _without_example() -> nn.Module:
    quantized = _quantized()
    quantized.record = replace(quantized.record, example=None)
    return quantized


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "export-float": (_net, {}),
    "export-lowered": (lambda: _quantized("x86"), {}),
    "export-dialect": (_torch_dialect, {}),
    "export-device": (_on_meta, {}),
    "export-option": (_quantized, {"options": {"opse": 18}}),
    "export-former-option": (_quantized, {"options": {"integer_outputs": True}}),
    "export-dynamic-name": (_quantized, {"dynamic_shapes": {"nope": {0: "batch"}}}),
    "export-example": (_without_example, {}),
    "export-fails": (_quantized, {"example_inputs": (torch.randn(2, 5),)}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_refused_export_says_why(name: str, tmp_path: Path, snapshot: Any) -> None:
    make, changes = MODELS[name]
    with pytest.raises(BackquantError) as raised:
        backquant.export(make(), tmp_path / "model.onnx", **changes)
    assert list(tmp_path.iterdir()) == []
    snapshot(name, raised.value, {"addmm: mat1": "mat1"})  # PyTorch 2.15 names the operator


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("capture-unknown", {"how": "jit"}),
        ("capture-dynamic-trace", {"how": "trace", "dynamic_shapes": {"input": {0: "batch"}}}),
    ],
)
def test_a_capture_that_cannot_be(name: str, arguments: dict[str, Any], snapshot: Any) -> None:
    with pytest.raises(BackquantError) as raised:
        Capturing(**arguments)
    snapshot(name, raised.value, {"addmm: mat1": "mat1"})  # PyTorch 2.15 names the operator


BY_HAND = {
    'capture="auto"': lambda *_: [Capturing(how) for how in ("auto", "trace", "export")],
    "dynamic_shapes=None": lambda *_: Capturing("trace", dynamic_shapes=None),
    "backquant.export(quantized.cpu()": lambda _, n: backquant.export(
        _quantized().cpu(), n["tmp_path"] / "a.onnx"
    ),
}
