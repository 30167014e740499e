"""The option ``opset`` is obeyed, or refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import backquant


class Net(nn.Module):
    """``normed``: with a layer norm, which ONNX has since operator set 17."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4) if normed else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.pad(self.conv(x).relu(), (1, 1)).amax((2, 3)).chunk(2, 1)
        return self.norm(self.fc(torch.cat(y, 1)))


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "normed"])
def quantized(request: Any) -> Any:
    batches = [torch.randn(2, 3, 8, 8) for _ in range(2)]
    model = Net(request.param).eval()
    return backquant.quantize(model, backend="onnxruntime", calibration=batches)


@pytest.mark.parametrize("opset", [9, 11, 13, 16, 99, "17", True, 18.0, None])
def test_no_operator_set(quantized: Any, opset: Any, tmp_path: Path) -> None:
    with pytest.raises(backquant.UsageError, match="opset is a whole number from 17"):
        backquant.export(quantized, tmp_path / "m.onnx", options={"opset": opset})


@pytest.mark.parametrize("to", ["onnx", "openvino", "qdq-onnx"])
@pytest.mark.parametrize("opset", [17, 18, 19, 21])
def test_operator_sets(quantized: Any, opset: int, to: str, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    backquant.export(quantized, path, to=to, options={"opset": opset}, require=0.0)
    assert {o.domain: o.version for o in onnx.load(path).opset_import}[""] == opset
