"""Operators beside the quantized model, output by output: integers within one step, most of them equal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import backquant
from backquant.deploy import Exported
from backquant.deploy.litert.target import LoadedFile
from litert_operators import IMAGES, IN_FLOAT, LINES, MOVES, POOLS, VALUES, Function, Several

TABLES = {"images": IMAGES, "pools": POOLS, "values": VALUES, "moves": MOVES, "lines": LINES}
#: Of what is composed of several roundings, or rounded by another rule, fewer values are equal.
FEWER_EQUAL = ("average", "bilinear", "corners", "hardswish", "leaky_relu", "silu", "matmul")


def _written(functions: dict[str, Function], x: torch.Tensor, path: Path) -> tuple[Any, Exported]:
    model = Several(functions).eval()
    quantized = backquant.quantize(model, x, backend="litert", calibration=[x], slower="keep")
    outputs = dict.fromkeys(range(len(functions)), True)
    return quantized, backquant.export(quantized, path, integer_io=outputs, require=0.0)


def _compared(
    functions: dict[str, Function], x: torch.Tensor, path: Path
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, float]]:
    quantized, exported = _written(functions, x, path)
    made = LoadedFile(path.read_bytes()).run([x.numpy()])
    for place, (name, one, array) in enumerate(zip(functions, quantized(x), made, strict=True)):
        edge = exported.edges[f"output {place}"]
        other = torch.from_numpy(np.ascontiguousarray(array)).float() - edge.zero_point
        yield name, one, other * edge.scale, edge.scale


@pytest.mark.parametrize("table", TABLES)
def test_integers_are_within_a_step(table: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 12) if table == "lines" else torch.randn(2, 4, 9, 8) * 1.5
    for name, one, other, step in _compared(TABLES[table], x, tmp_path / "ops.tflite"):
        assert step > 0, f"{name} is in float"
        assert one.shape == other.shape, name
        assert (one - other).abs().max() <= 1.01 * step, name
        equal = ((one - other).abs() < 0.5 * step).float().mean()
        assert equal >= (0.7 if name in FEWER_EQUAL else 0.99), (name, float(equal))


def test_what_has_no_kernel_on_integers_is_composed_in_float(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 8)
    model, path = Several(IN_FLOAT).eval(), tmp_path / "ops.tflite"
    quantized = backquant.quantize(model, x, backend="litert", calibration=[x], slower="keep")
    for place in range(len(IN_FLOAT)):
        with pytest.raises(backquant.ConfigError, match=f"output {place} cannot be integers"):
            backquant.export(quantized, path, integer_io={place: True})
    backquant.export(quantized, path, require=0.0)
    made = LoadedFile(path.read_bytes()).run([x.numpy()])
    for name, one, other in zip(IN_FLOAT, quantized(x), made, strict=True):
        torch.testing.assert_close(
            torch.from_numpy(other.copy()), one, rtol=1e-3, atol=1e-4, msg=name
        )


def test_a_free_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 8)
    parts = {name: IMAGES[name] for name in ("same", "depthwise", "flattened")}
    model = Several(parts).eval()
    quantized = backquant.quantize(model, x, backend="litert", calibration=[x])
    path = tmp_path / "free.tflite"
    backquant.export(quantized, path, dynamic_shapes={"x": {0: "batch"}})
    file = LoadedFile(path.read_bytes())
    assert file.inputs == {"x": [None, 4, 9, 8]}
    for size in (1, 5, 3):
        other = torch.randn(size, 4, 9, 8)
        for one, made in zip(quantized(other), file.run([other.numpy()]), strict=True):
            torch.testing.assert_close(torch.from_numpy(made), one, rtol=0, atol=0.1)


def test_a_free_size_that_the_file_fixes_is_refused(tmp_path: Path) -> None:
    x = torch.randn(2, 4, 8, 8)
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 4, 2, 2)).eval()
    quantized = backquant.quantize(model, x, backend="litert", calibration=[x])
    with pytest.raises(backquant.ExportError, match="free sizes"):
        backquant.export(quantized, tmp_path / "m.tflite", dynamic_shapes={"input": {0: "batch"}})
    assert not list(tmp_path.iterdir())
