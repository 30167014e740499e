"""Calibration data that say nothing: a channel that is always 0, constants, huge and denormal numbers.

executorch#8830, openvino#36290: a ReLU that was 0 on all of the data gave files that do not load. Here every
operator of a model sees such values; ``export`` loads its file and compares it with the quantized model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backquant

DATA = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(1))
SPIKE = torch.zeros_like(DATA)
SPIKE[0, 0, 0, 0] = 5.0
RANGES = {
    "zero": DATA * 0,
    "constant": DATA * 0 + 3.0,
    "negative constant": DATA * 0 - 2.0,
    "one pixel": SPIKE,
    "huge": DATA * 1e15,
    "tiny": DATA * 1e-38,
    "denormal": DATA * 1e-41,
}
TARGETS = {"onnxruntime": "onnx", "openvino": "xml", "executorch": "pte", "litert": "tflite"}


class Heads(nn.Module):
    """One output for each operator; the first ReLU is always 0 (but on huge data)."""

    def __init__(self) -> None:
        super().__init__()
        self.dead, self.stem = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.after_dead, self.after_add = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(4, 4)
        with torch.no_grad():
            self.dead.bias.fill_(-1000.0)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.stem(x)
        return (
            self.after_dead(F.relu(self.dead(x))),
            self.after_add(y + x),
            torch.cat([y, x], 1),
            y * x,
            torch.sigmoid(y),
            F.max_pool2d(y, 2),
            self.fc(x.mean((2, 3))),
        )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", RANGES)
def test_a_file_is_written_that_loads_and_agrees(name: str, target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = Heads().eval(), RANGES[name]
    quantized = backquant.quantize(model, data, backend=target, calibration=[data])
    path = tmp_path / f"model.{TARGETS[target]}"
    backquant.export(quantized, path)
    finite = [torch.isfinite(one).all() for one in model(data)]
    assert [torch.isfinite(one).all() for one in quantized(data)] == finite


class Pooled(nn.Module):
    """A pool whose flattened values are measured apart from what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc = nn.Conv2d(4, 4, 3, padding=1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(self.stem(x), 1).flatten(1))


def _without_weights() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(-1000.0)
    return model


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("make", [Pooled, _without_weights])
def test_small_models(make: Callable[[], nn.Module], target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    for name in ("constant", "one pixel", "random"):
        model, data = make().eval(), RANGES.get(name, DATA)
        quantized = backquant.quantize(model, data, backend=target, calibration=[data])
        exported = backquant.export(quantized, tmp_path / f"{name}.{TARGETS[target]}")
        assert min(exported.sqnr.values()) > 10


@pytest.mark.parametrize("target", TARGETS)
def test_what_was_always_zero_keeps_what_comes_later(target: str) -> None:
    """Any scale holds zeros: one that hardware can requantize to, and that holds values of usual sizes."""
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()).eval()
    with torch.no_grad():
        model[0].bias.fill_(-1000.0)
    quantized = backquant.quantize(model, DATA, backend=target, calibration=[DATA])
    assert [
        q.scale.item() for q in quantized.record.qparams.values() if q.scale.item() < 1e-6
    ] == []
