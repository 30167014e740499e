from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import backquant

Run = Callable[..., Any]
CHOSEN = """
import torch
from torch import nn

class Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), nn.Linear(8, 4)
    def forward(self, x):
        means = self.conv(x).mean([2, 3])
        return self.fc(means[means.sum(1) > 0])

def make():
    torch.manual_seed(0)
    return Chosen().eval()
"""


def quantize(*more: str) -> tuple[str, ...]:
    return ("quantize-parts", "chosen:make", "--data", "images.npz", "-o", "parts", *more)


def test_parts_are_written(run: Run, here: Path) -> None:
    (here / "chosen.py").write_text(CHOSEN)
    result = run(*quantize("--slower", "keep"))
    assert result.status == 0 and "wrote parts" in result.out and "conv: " in result.out
    scope: dict[str, Any] = {}
    exec(CHOSEN, scope)
    loaded = backquant.load_parts(scope["make"](), "parts")
    images = torch.from_numpy(np.load("images.npz")["x"])
    assert list(loaded.parts) == ["conv", "fc"] and loaded(images).shape[1] == 4


def test_parts_as_data(run: Run, here: Path) -> None:
    (here / "chosen.py").write_text(CHOSEN)
    found = run(*quantize("--slower", "keep", "--part", "fc", "--json")).data
    assert list(found["parts"]) == ["fc"] and 0 < found["coverage"] < 0.5


def test_refused(run: Run, here: Path, snapshot: Callable[..., None]) -> None:
    (here / "chosen.py").write_text(CHOSEN)
    less = run(*quantize("--slower", "keep", "--part", "fc", "--require", "0.9"))
    assert less.status == 1
    snapshot("less-than-required", less.err[less.err.index("error:") :])
    (here / "parts").mkdir()
    exists = run(*quantize())
    assert exists.status == 2
    snapshot("a-folder-that-exists", exists.err)
