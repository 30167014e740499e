"""Pooling with every attribute gives in ONNX files what PyTorch computes, or is refused by name."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backquant
from backquant.deploy.onnx.exporter import exported_to_onnx
from backquant.deploy.onnx.translate import translations
from backquant.graph import register_quantized_decomposed
from backquant.graph.silence import quiet

SIZES = {1: (11,), 2: (11, 14), 3: (6, 7, 8)}
CASES = [
    case
    for case in itertools.product(
        (1, 2, 3), (2, 3), (1, 2, 3), (0, 1), (False, True), (False, True), (None, 1, 5)
    )
    if case[0] != 1 or case[6] is None
]


class Pools(nn.Module):
    """All cases of a number of axes, each an output."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.pool = getattr(F, f"avg_pool{dims}d")
        self.cases = [case[1:] for case in CASES if case[0] == dims]

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.pool(x, *case[:5], *(case[5:] if x.dim() > 3 else ())) for case in self.cases]


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_average_pools(dims: int, runtime: str, tmp_path: Path) -> None:
    register_quantized_decomposed()
    x, model = torch.randn(2, 3, *SIZES[dims]), Pools(dims)
    with quiet():
        made = exported_to_onnx(torch.export.export(model, (x,)), translations(), 18)
    path = tmp_path / "pools.onnx"
    made.save(str(path))
    found = _run(runtime, path, x)
    for case, wanted, got in zip(model.cases, model(x), found, strict=True):
        assert torch.allclose(torch.as_tensor(got), wanted, atol=1e-5), case


MAX_CASES = [*itertools.product((2, 3), (1, 2, 3), (0, 1), (1, 2), (False, True))]


class Maxima(nn.Module):
    """The same for maxima: kernel, stride, padding, dilation, ceil mode."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.pool = getattr(F, f"max_pool{dims}d")

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [self.pool(x, *case) for case in MAX_CASES]


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_maxima(dims: int, runtime: str, tmp_path: Path) -> None:
    x, model = torch.randn(2, 3, *SIZES[dims]), Maxima(dims)
    with quiet():
        program = torch.export.export(model, (x,))
        made = exported_to_onnx(program, translations(), 18)
    path = tmp_path / "pools.onnx"
    made.save(str(path))
    found = _run(runtime, path, x)
    for case, wanted, got in zip(MAX_CASES, model(x), found, strict=True):
        assert torch.allclose(torch.as_tensor(got), wanted, atol=1e-5), case


def _run(runtime: str, path: Path, x: torch.Tensor) -> list[Any]:
    if runtime == "onnxruntime":
        session = pytest.importorskip(runtime).InferenceSession(str(path))
        return list(session.run(None, {session.get_inputs()[0].name: x.numpy()}))
    compiled = (
        pytest.importorskip(runtime)
        .Core()
        .compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    )
    found = compiled([x.numpy()])
    return [found[output] for output in compiled.outputs]


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(self.conv(x), 3, 2, ceil_mode=True)


def test_ceil_mode_on_a_free_size_is_refused(tmp_path: Path) -> None:
    batches = [torch.randn(2, 3, 16, 16) for _ in range(2)]
    quantized = backquant.quantize(Pooled().eval(), backend="onnxruntime", calibration=batches)
    with pytest.raises(backquant.ExportError, match="ceil_mode=True on a free size"):
        backquant.export(quantized, tmp_path / "m.onnx", dynamic_shapes={"x": {2: "height"}})


class PooledMaxima(nn.Module):
    """A free height where ceil mode may differ, beside a width of a known size; no sums that overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        nn.init.dirac_(self.conv.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(self.conv(x), (3, 2), (2, 3), (1, 1), ceil_mode=True)


def test_maxima_in_ceil_mode_on_a_free_size(tmp_path: Path) -> None:
    batches = [torch.randn(2, 3, 16, 17) for _ in range(2)]
    model, file = PooledMaxima().eval(), tmp_path / "m.onnx"
    quantized = backquant.quantize(model, backend="onnxruntime", calibration=batches)
    backquant.export(quantized, file, dynamic_shapes={"x": {2: "height"}})
    for height in (16, 9, 10, 20):
        x = torch.rand(2, 3, height, 17)
        (result,) = _run("onnxruntime", file, x)
        error = (torch.as_tensor(result) - quantized(x)).abs()
        assert error.mean() < 1e-3, height  # few values are rounded to the next step
