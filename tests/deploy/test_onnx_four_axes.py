"""Attention with any number of axes is written to ONNX, and computes the same."""

from __future__ import annotations

from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant


class Attention(nn.Module):
    """A mask of floats is added: attention stays whole."""

    def __init__(self, front: tuple[int, ...], mask: tuple[int, ...]) -> None:
        super().__init__()
        self.front, self.layer = front, nn.Linear(8, 24)
        self.mask = nn.Buffer(torch.randn(mask)) if mask else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, 6, 8]``."""
        parts = self.layer(x).reshape(-1, *self.front, 6, 8, 3).unbind(-1)
        q, k, v = parts if len(self.front) else (part.flatten(0, -3) for part in parts)
        return F.scaled_dot_product_attention(q, k, v, self.mask)


CASES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), (6, 6)),
    ((), ()),
    ((2, 3), (6, 6)),
    ((2, 3), (3, 6, 6)),
    ((2, 2, 3), (3, 6, 6)),
]


FREE = [(*case, True) for case in CASES[:2]]


@pytest.mark.parametrize(("front", "mask", "is_free"), [*((*case, False) for case in CASES), *FREE])
def test_the_same_numbers(
    tmp_path: Any, front: tuple[int, ...], mask: tuple[int, ...], is_free: bool
) -> None:
    torch.manual_seed(0)
    model = Attention(front, mask).eval()
    size = 3 if not front else 2 * int(torch.tensor(front).prod())
    x, path = torch.randn(size, 6, 8), tmp_path / "m.onnx"
    result = backquant.quantize(model, x, backend="onnxruntime", calibration=[x])
    shapes = {"x": {0: torch.export.Dim.AUTO}} if is_free else None
    backquant.export(result, path, example_inputs=x, dynamic_shapes=shapes)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for inputs in [x, torch.randn(2 * size, 6, 8)] if is_free else [x]:
        [got] = session.run(None, {"x": inputs.numpy()})
        assert got.shape == result(inputs).shape
        assert torch.allclose(torch.from_numpy(got), result(inputs), atol=0.05)
