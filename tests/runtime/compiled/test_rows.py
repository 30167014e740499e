"""Convolutions of one dimension in compiled code: those of images of one row."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant
from backquant.native.plan import has_kernels
from backquant.runtime.compiled import modules

pytestmark = pytest.mark.xdist_group("compiled")

LAYERS = {
    "dense": nn.Conv1d(6, 10, 3, padding=1),
    "strided": nn.Conv1d(6, 10, 5, 3, dilation=2),
    "one channel": nn.Conv1d(1, 7, 16, 8),
    "depthwise": nn.Conv1d(6, 6, 5, padding=2, groups=6),
    "depthwise, strided": nn.Conv1d(6, 6, 3, 2, padding=1, groups=6),
    "depthwise, dilated": nn.Conv1d(6, 6, 3, padding=2, dilation=2, groups=6),
    "grouped": nn.Conv1d(16, 16, 3, padding=1, groups=2),
    "clamped": nn.Sequential(nn.Conv1d(6, 10, 3), nn.ReLU6()),
}


def _channels(layer: nn.Module) -> int:
    first = layer[0] if isinstance(layer, nn.Sequential) else layer
    return int(first.in_channels)


class Lines(nn.Module):
    """All of them on their inputs; the results of half of them are integers, which a pool reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LAYERS.values())

    def forward(self, *lines: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = [layer(x) for layer, x in zip(self.layers, lines, strict=True)]
        return (*found[::2], *(nn.functional.max_pool1d(x, 2) for x in found[1::2]))


@pytest.mark.parametrize("most", [modules._FEW, 0])
def test_lines_are_images_of_one_row_where_they_give_few_values(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "_FEW", most)
    torch.manual_seed(0)

    def batch() -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(2, _channels(layer), 41) for layer in LAYERS.values())

    data = [batch() for _ in range(3)]
    quantized = backquant.quantize(Lines().eval(), calibration=data, slower="keep")
    compiled = quantized.compile()
    kernels = compiled.compilation.kernels
    if has_kernels() and most:  # the depthwise one with dilation is oneDNN's
        assert kernels["backquant.convolution"] + kernels["backquant.depthwise"] == len(LAYERS) - 1
    else:
        assert kernels["onednn.qconv_pointwise"] == len(LAYERS)
    inputs = batch()
    for wanted, found in zip(quantized(*inputs), compiled(*inputs), strict=True):
        assert wanted.shape == found.shape
        apart, largest = (wanted - found).abs(), wanted.abs().max()
        assert apart.max() <= largest * 2.5 / 255  # one step, about
        assert (apart > largest * 1e-5).float().mean() < 0.01


class Columns(nn.Module):
    """Convolutions along a column of one pixel, which are computed along a line, and one of three pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, (96, 1), (4, 1))
        self.padded = nn.Conv2d(16, 8, (5, 1), (2, 1), (3, 0), (2, 1), groups=2)
        self.wide = nn.Conv2d(8, 8, (5, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.padded(torch.relu(self.first(x)))
        return self.wide(x.expand(-1, -1, -1, 3))


def test_columns_are_lines() -> None:
    torch.manual_seed(0)
    data = [torch.randn(2, 1, 300, 1) for _ in range(3)]
    quantized = backquant.quantize(Columns().eval(), calibration=data, slower="keep")
    compiled = quantized.compile()
    wanted, found = quantized(data[0]), compiled(data[0])
    apart, largest = (wanted - found).abs(), wanted.abs().max()
    assert wanted.shape == found.shape and apart.max() <= largest * 2.5 / 255
    assert (apart > largest * 1e-5).float().mean() < 0.01
