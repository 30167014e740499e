"""The example of docs/capture.md: a loop over chosen experts, written so that a file can hold it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import CaptureError

PAGE = (Path(__file__).parents[2] / "docs" / "capture.md").read_text(encoding="utf-8")


class SwitchTransformersExperts(nn.ModuleDict):
    """Called as that of transformers: rows, one-hot choices ``[rows, 1, experts]``, weights ``[rows, 1]``."""

    def forward(
        self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        total = torch.zeros_like(rows)
        for expert in chosen.sum((0, 1)).nonzero():
            places = chosen[:, 0, expert[0]].nonzero()[:, 0]
            total[places] = self[str(int(expert))](rows[places]) * weights[places]
        return total


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = SwitchTransformersExperts({str(i): nn.Linear(8, 8) for i in range(3)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        chosen = nn.functional.one_hot(shares.argmax(-1), 3)
        return self.experts(x, chosen[:, None], shares.amax(-1, keepdim=True))


def test_experts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batches = Routed().eval(), [torch.randn(16, 8) for _ in range(3)]
    x = batches[0]
    looped = backquant.quantize(model, backend="onnxruntime", calibration=batches, slower="keep")
    assert any("'experts' stays float as a whole" in note for note in looped.report.notes)
    with pytest.raises(CaptureError) as told:
        backquant.export(looped, tmp_path / "looped.onnx", example_inputs=x)
    assert "docs/capture.md" in told.value.fix
    wanted = model(x)
    [code] = [
        found
        for found in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
        if "AllExperts" in found
    ]
    names: dict[str, Any] = {"torch": torch, "model": model}
    exec(compile(code, "docs/capture.md", "exec"), names)
    assert torch.equal(model(x), wanted)
    dense = backquant.quantize(model, backend="onnxruntime", calibration=batches, slower="keep")
    exported = backquant.export(dense, tmp_path / "dense.onnx", example_inputs=x)
    assert exported.integer_share == 1.0
