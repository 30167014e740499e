"""Operators that the exporter does not translate give the same numbers in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backquant
from backquant import ExportError


class Pooled(nn.Module):
    def __init__(self, pool: Any, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pool, self.conv = pool, (nn.Conv1d, nn.Conv2d, nn.Conv3d)[rank - 1](3, 4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.pool(self.conv(x))


def exported(pool: Any, sizes: tuple[int, ...], path: Path) -> tuple[list[Tensor], Any]:
    """What ONNX Runtime gives, and what the quantized model gives."""
    x = torch.randn(2, 3, *sizes)
    made = backquant.quantize(
        Pooled(pool, len(sizes)).eval(), x, backend="onnxruntime", calibration=[x]
    )
    backquant.export(made, path / "m.onnx", example_inputs=x)
    found = onnxruntime.InferenceSession(path / "m.onnx").run(None, {"x": x.numpy()})
    return [torch.from_numpy(value) for value in found], made(x)


@pytest.mark.parametrize(
    ("sizes", "pool"),
    [
        ((10, 14), lambda x: F.adaptive_max_pool2d(x, 1)),
        ((10, 14), lambda x: F.adaptive_max_pool2d(x, (2, 3))),
        ((18,), lambda x: F.adaptive_max_pool1d(x, 4)),
        ((6, 6, 10), lambda x: F.adaptive_max_pool3d(x, (2, 2, 4))),
    ],
)
def test_adaptive_maxima(sizes: tuple[int, ...], pool: Any, tmp_path: Path) -> None:
    [found], wanted = exported(pool, sizes, tmp_path)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.05)


def test_places_of_adaptive_maxima(tmp_path: Path) -> None:
    found, wanted = exported(
        lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True), (6, 6), tmp_path
    )
    assert found[1].shape == wanted[1].shape
    assert (found[1] == wanted[1]).float().mean() > 0.8  # steps may fall together
    assert int(found[1].max()) < 16


def test_windows_of_several_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="differ in size"):
        exported(lambda x: F.adaptive_max_pool2d(x, 3), (10, 12), tmp_path)
