from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import backquant


class Shuffles(nn.Module):
    def __init__(self, spelling: str) -> None:
        super().__init__()
        self.conv, self.out, self.spelling = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1), spelling

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv(x))
        batch, channels, height, width = x.shape
        if self.spelling == "methods":
            y = x.view(batch, 2, channels // 2, height, width).transpose(1, 2).contiguous()
            y = y.view(batch, channels, -1, width)
        elif self.spelling == "functions":
            y = torch.transpose(x.view(batch, 2, 4, height, width), 2, 1)
            y = y.reshape(batch, channels, height, width)
        elif self.spelling == "another":  # two readers of the middle: nothing to join
            y = x.view(batch, 2, 4, height, width)
            y = y.transpose(1, 2).reshape(batch, 8, height, width) + y.reshape(x.shape)
        else:  # not four sizes one by one
            y = x.view(batch, 2, 4, width, height).transpose(1, 2).reshape(x.shape)
        return self.out(y)


@pytest.mark.parametrize(
    ("spelling", "joined"), [("methods", 1), ("functions", 1), ("another", 0), ("no", 0)]
)
def test_shuffles_become_one_kernel_and_mean_the_same(spelling: str, joined: int) -> None:
    torch.manual_seed(0)
    model, x = Shuffles(spelling).eval(), torch.randn(2, 3, 6, 4)
    quantized: Any = backquant.quantize(model, x, backend="x86", calibration=[x])
    uses = [use.kernel for use in quantized.kernels if "shuffle" in use.kernel]
    assert len(uses) == joined
    assert quantized.audit().kernels.get("shuffle", 0) == joined
    with torch.no_grad():
        for shape in ((2, 3, 6, 4), (1, 3, 5, 7)):
            x = torch.randn(shape)
            for _ in range(3):
                far = (quantized(x) - model(x)).abs()
                assert not far.numel() or far.max() < 0.1
