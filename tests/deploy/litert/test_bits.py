"""Bit by bit: LiteRT's reference kernels and TensorFlow Lite for Microcontrollers beside the integer
reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import backquant
from backquant.deploy.litert.readback import LoadedFile
from litert_operators import IMAGES, LINES, POOLS, VALUES, Function, Several

#: What LiteRT rounds by another rule than its definition of the operator says, or the integer reference
#: has not.
OTHERWISE = ("leaky_relu", "hardswish", "silu", "hardsigmoid", "prelu", "log_softmax", "elu")
#: Products of two activations, and means: up to 2 in 100 values (of few, one) are a step off.
NEARLY = ("mul", "matmul", "mean", "mean_of_channels", "whole")
SUMS = {
    k: f for k, f in {**VALUES, **POOLS}.items() if k not in (*OTHERWISE, "bilinear", "corners")
}


def _files(functions: dict[str, Function], x: torch.Tensor, path: Path) -> tuple[object, bytes]:
    """The integer reference, and the file; of one calibration."""
    model = Several(functions).eval()
    mapping = backquant.get_default_qconfig_mapping("litert_micro")
    prepared = backquant.prepare_fx(model, mapping, x, backend_config="litert_micro")
    prepared(x)
    whole = backquant.convert_to_integer_reference(prepared)
    reference = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
    options = {"integer_outputs": True}
    backquant.export(reference, path, to="litert", options=options, require=0.0, example_inputs=x)
    return whole, path.read_bytes()


@pytest.mark.parametrize("table", ["images", "lines", "sums"])
def test_reference_kernels_give_the_bits_of_the_integer_reference(
    table: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    functions = {"images": IMAGES, "lines": LINES, "sums": SUMS}[table]
    x = torch.randn(2, 4, 12) if table == "lines" else torch.randn(2, 4, 9, 8)
    whole, content = _files(functions, x, tmp_path / "bits.tflite")
    file = LoadedFile(content, reference=True)
    other = torch.randn(x.shape)
    made = file.run([other.numpy()])
    details = file.interpreter.get_output_details()
    off = {}
    for name, one, array, detail in zip(functions, whole(other), made, details, strict=True):
        scale = detail["quantization"][0]
        steps = ((one - torch.from_numpy(np.array(array))) / scale).abs()
        assert steps.max() < 1.5, name
        wrong = int((steps > 0.5).sum())
        if wrong > (max(1, 0.02 * steps.numel()) if name in NEARLY else 0):
            off[name] = wrong
    assert off == {}


def test_microcontrollers_run_the_same_file_with_the_same_bits(tmp_path: Path) -> None:
    from tflite_micro import runtime

    torch.manual_seed(0)
    x = torch.rand(1, 4, 9, 8)
    parts = {name: IMAGES[name] for name in ("one_side", "depthwise", "flattened", "relu6")}
    model = Several(parts).eval()
    quantized = backquant.quantize(model, x, backend="litert_micro", calibration=[x])
    path = tmp_path / "micro.tflite"
    edges = {"integer_inputs": True, "integer_outputs": True}
    backquant.export(quantized, path, options=edges)
    content = path.read_bytes()
    micro = runtime.Interpreter.from_bytes(content)
    file = LoadedFile(content, reference=True)
    for _ in range(3):
        file.run([torch.rand(1, 4, 9, 8).numpy()])
        [given] = file.interpreter.get_input_details()
        micro.set_input(file.interpreter.get_tensor(given["index"]), 0)
        micro.invoke()
        for place, each in enumerate(file.interpreter.get_output_details()):
            assert np.array_equal(
                micro.get_output(place), file.interpreter.get_tensor(each["index"])
            )
