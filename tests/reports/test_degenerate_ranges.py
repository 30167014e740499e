"""Calibration data that say nothing: a channel that is always 0, constants, huge and denormal numbers.

executorch#8830, openvino#36290: a ReLU that was 0 on all of the data gave files that do not load. Here every
operator of a model sees such values; ``export`` loads its file and compares it with the quantized model.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backquant
from backquant.errors import ExportError

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


#: Refused by ``export`` in the runtime's words; not yet at ``quantize``, by the operator.
OPEN = {
    ("constant", "openvino"): "could not append an elementwise post-op",
    ("constant", "litert"): "failed to create XNNPACK runtime",
    ("one pixel", "litert"): "failed to create XNNPACK runtime",
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", RANGES)
def test_a_file_is_written_that_loads_and_agrees(name: str, target: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, data = Heads().eval(), RANGES[name]
    quantized = backquant.quantize(model, data, backend=target, calibration=[data])
    path = tmp_path / f"model.{TARGETS[target]}"
    if (name, target) in OPEN:
        with pytest.raises(ExportError, match=OPEN[name, target]):
            backquant.export(quantized, path)
        assert not path.exists()
        return
    backquant.export(quantized, path)
    finite = [torch.isfinite(one).all() for one in model(data)]
    assert [torch.isfinite(one).all() for one in quantized(data)] == finite
