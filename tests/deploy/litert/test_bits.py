"""Bit by bit: LiteRT's reference kernels and TensorFlow Lite for Microcontrollers beside the integer
reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import backquant
from backquant.deploy import Exported
from backquant.deploy.litert.target import LoadedFile
from litert_operators import IMAGES, LINES, POOLS, VALUES, Function, Several

#: What LiteRT rounds by another rule than its definition of the operator says, or the integer reference
#: has not.
OTHERWISE = ("leaky_relu", "hardswish", "silu", "hardsigmoid", "prelu", "log_softmax", "elu")
#: Products of two activations, and means: up to 2 in 100 values (of few, one) are a step off.
NEARLY = ("mul", "matmul", "mean", "mean_of_channels", "whole")
SUMS = {
    k: f for k, f in {**VALUES, **POOLS}.items() if k not in (*OTHERWISE, "bilinear", "corners")
}


#: With activations of 16 bits: no kernel of LiteRT's, or tables between whose entries it interpolates.
NOT_WIDE = ("upscaled", "gelu", "elu", "hardswish", "prelu", "log_softmax")
NEAR_TABLES = ("over_channels", "sigmoid", "tanh", "softmax", "silu")
ROUNDED_OTHERWISE = (
    "leaky_relu",
    "hardsigmoid",
    "bilinear",
    "corners",
    "mean",
    "average",
    "linear",
)
#: A multiplier of 16 bits whose rounding is a tie.
TIES = ("even", "transposed_cut", "flattened", "matmul", "mul_number")


def _files(
    functions: dict[str, Function], x: torch.Tensor, path: Path, backend: str = "litert_micro"
) -> tuple[Any, Exported]:
    """The integer reference, and the file with integers at its outputs; of one calibration."""
    model = Several(functions).eval()
    mapping = backquant.get_default_qconfig_mapping(backend)
    prepared = backquant.prepare_fx(model, mapping, x, backend_config=backend)
    prepared(x)
    whole = backquant.convert_to_integer_reference(prepared)
    reference = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
    outputs = dict.fromkeys(range(len(functions)), True)
    exported = backquant.export(
        reference, path, to="litert", integer_io=outputs, require=0.0, example_inputs=x
    )
    return whole, exported


@pytest.mark.parametrize("table", ["images", "lines", "sums"])
def test_reference_kernels_give_the_bits_of_the_integer_reference(
    table: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    functions = {"images": IMAGES, "lines": LINES, "sums": SUMS}[table]
    x = torch.randn(2, 4, 12) if table == "lines" else torch.randn(2, 4, 9, 8)
    whole, exported = _files(functions, x, tmp_path / "bits.tflite")
    file = LoadedFile(exported.path.read_bytes(), reference=True)
    other = torch.randn(x.shape)
    made = file.run([other.numpy()])
    off = {}
    for place, (name, one, array) in enumerate(zip(functions, whole(other), made, strict=True)):
        edge = exported.edges[f"output {place}"]
        steps = (one / edge.scale + edge.zero_point - torch.from_numpy(np.array(array))).abs()
        assert steps.max() < 1.5, name
        wrong = int((steps > 0.5).sum())
        if wrong > (max(1, 0.02 * steps.numel()) if name in NEARLY else 0):
            off[name] = wrong
    assert off == {}


@pytest.mark.parametrize("table", ["images", "lines", "pools", "values"])
def test_activations_of_16_bits_are_multiplied_by_16_bits(table: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    every = {"images": IMAGES, "lines": LINES, "pools": POOLS, "values": VALUES}[table]
    functions = {name: one for name, one in every.items() if name not in NOT_WIDE}
    x = torch.randn(2, 4, 12) if table == "lines" else torch.randn(2, 4, 9, 8)
    whole, exported = _files(functions, x, tmp_path / "wide.tflite", "litert_16x8")
    assert {each.dtype for each in exported.kernels} <= {"int16", "float32"}
    file = LoadedFile(exported.path.read_bytes(), reference=True)
    other = torch.randn(x.shape)
    made = file.run([other.numpy()])
    for place, (name, one, array) in enumerate(zip(functions, whole(other), made, strict=True)):
        edge = exported.edges[f"output {place}"]
        steps = (one / edge.scale + edge.zero_point - torch.from_numpy(np.array(array))).abs()
        assert steps.max() < (2.5 if name in NEAR_TABLES else 1.5), name
        if name not in (*NEAR_TABLES, *ROUNDED_OTHERWISE, *NEARLY):
            assert (steps > 0.5).sum() <= (max(1, 0.03 * steps.numel()) if name in TIES else 0), (
                name
            )


def test_microcontrollers_run_the_same_file_with_the_same_bits(tmp_path: Path) -> None:
    from tflite_micro import runtime

    torch.manual_seed(0)
    x = torch.rand(1, 4, 9, 8)
    parts = {name: IMAGES[name] for name in ("one_side", "depthwise", "flattened", "relu6")}
    model = Several(parts).eval()
    quantized = backquant.quantize(model, x, backend="litert_micro", calibration=[x])
    path = tmp_path / "micro.tflite"
    exported = backquant.export(quantized, path, integer_io=True)
    edge = exported.edges["x"]
    content = path.read_bytes()
    micro = runtime.Interpreter.from_bytes(content)
    file = LoadedFile(content, reference=True)
    for _ in range(3):
        steps = torch.rand(1, 4, 9, 8) / edge.scale + edge.zero_point
        file.run([steps.round().clamp(edge.quant_min, edge.quant_max).numpy()])
        [given] = file.interpreter.get_input_details()
        micro.set_input(file.interpreter.get_tensor(given["index"]), 0)
        micro.invoke()
        for place, each in enumerate(file.interpreter.get_output_details()):
            assert np.array_equal(
                micro.get_output(place), file.interpreter.get_tensor(each["index"])
            )
