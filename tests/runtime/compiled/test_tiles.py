"""Compiled products by AMX: where the CPU has none, its tiles are emulated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import backquant
from backquant.native import SOURCES
from backquant.native.plan import has_kernels, has_tiles
from backquant.runtime.compiled import lowerings

pytestmark = pytest.mark.skipif(not has_kernels(), reason="no AVX-512 VNNI")


class Ways(nn.Module):
    """Pixels in lines (three channels, stride 2), with borders (3×3), gathered (few in a line), and as they
    lie (1×1, linear); one sum is added."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 32, 3, stride=2, padding=1)
        self.stem = nn.Conv2d(32, 64, 3, padding=1)
        self.deep = nn.Conv2d(64, 64, 3, padding=2, dilation=2)
        self.down = nn.Conv2d(64, 48, 3, stride=2, padding=1)
        self.wide = nn.Conv2d(48, 100, 1)
        self.fc = nn.Linear(100, 70)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(self.first(x).relu()).relu()
        x = (x + self.deep(x)).relu()
        x = self.wide(self.down(x).relu())
        return self.fc(x.flatten(2).transpose(1, 2))


def test_products_by_tiles_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Ways().eval(), torch.randn(2, 3, 18, 32)
    quantized = backquant.quantize(model, backend="x86", calibration=[x], slower="keep")
    monkeypatch.setattr(lowerings, "has_tiles", lambda: False)
    expected = quantized.compile()(x)
    if not has_tiles():
        emulated = tmp_path / "emulated.h"
        header = SOURCES / "tiles.h"
        emulated.write_text(f'#define BACKQUANT_EMULATED_TILES\n#include "{header}"\n')
        monkeypatch.setattr(lowerings, "TILES", emulated)
    monkeypatch.setattr(lowerings, "has_tiles", lambda: True)
    compiled = quantized.compile()
    assert compiled.compilation is not None
    assert "6 backquant.convolution" in compiled.compilation.describe()
    assert torch.equal(compiled(x), expected)
