"""Convolutions of volumes are ones of images for ExecuTorch, in float and on integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import backquant
from backquant.deploy.executorch import ExecuTorchModel
from backquant.deploy.executorch.lowering import lower_program
from backquant.deploy.executorch.rewrites import rewrite
from backquant.deploy.program import Program
from backquant.graph.silence import quiet

FLOATS = {
    "plain": nn.Conv3d(4, 6, 3, padding=1),
    "without-bias": nn.Conv3d(4, 6, (1, 3, 3), bias=False),
    "stride": nn.Conv3d(4, 6, (3, 2, 2), stride=(2, 2, 1), padding=(1, 0, 0)),
    "wide-stride": nn.Conv3d(4, 6, (2, 1, 1), stride=(3, 1, 1)),
    "dilation": nn.Conv3d(4, 6, 3, dilation=(2, 1, 2), stride=(2, 1, 1)),
    "patches": nn.Conv3d(4, 6, (2, 4, 4), stride=(2, 4, 4)),
    "whole-depth": nn.Conv3d(4, 6, (8, 4, 4), stride=4),
    "depthwise": nn.Conv3d(4, 8, 3, padding=1, groups=4),
    "same": nn.Conv3d(4, 6, (4, 3, 2), padding="same"),
    "valid": nn.Conv3d(4, 6, 3, padding="valid"),
    "up": nn.ConvTranspose3d(4, 6, 2, stride=2),
    "up-in-groups": nn.ConvTranspose3d(4, 6, (2, 3, 3), stride=(2, 1, 1), groups=2, bias=False),
    "up-overlapping": nn.ConvTranspose3d(4, 6, 3, stride=2, padding=1, output_padding=1),
    "up-dilated": nn.ConvTranspose3d(4, 6, (2, 1, 1), stride=(1, 2, 2), dilation=(2, 1, 1)),
}
INTEGERS = ("plain", "stride", "patches", "whole-depth", "depthwise", "same")


def decibels(wanted: torch.Tensor, got: torch.Tensor) -> float:
    return float(10 * torch.log10(wanted.square().sum() / (wanted - got).square().sum()))


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("free", [None, 0, 2, 3])
def test_values_stay(name: str, free: int | None) -> None:
    """With every size known, and with the batch, the depth or the rows free."""
    torch.manual_seed(0)
    model, x = FLOATS[name].eval(), torch.randn(2, 4, 8, 12, 12)
    size: Any = Dim("n", min=2, max=64) * 2 if free else Dim("n", min=1, max=8)
    more: Any = {} if free is None else {"dynamic_shapes": {"input": {free: size}}}
    with quiet(), torch.no_grad():
        program = torch.export.export(model, (x,), **more).run_decompositions({})
        rewrite(program)
        names = {str(node.target).removeprefix("aten.") for node in program.graph.nodes}
        assert not {each for each in names if each.startswith(("conv3d", "conv_transpose3d"))}
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["stride", "patches", "up", "up-overlapping"])
def test_run(name: str) -> None:
    torch.manual_seed(0)
    model, x = FLOATS[name].eval(), torch.randn(2, 4, 8, 12, 12)
    with quiet(), torch.no_grad():
        made = lower_program(Program(torch.export.export(model, (x,)), {})).buffer
        torch.testing.assert_close(ExecuTorchModel(made)(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_volume_without_samples() -> None:
    model, x = nn.Conv3d(4, 6, 3).eval(), torch.randn(4, 8, 12, 12)
    with quiet(), torch.no_grad():
        program = torch.export.export(model, (x,)).run_decompositions({})
        rewrite(program)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-4, atol=1e-5)


def test_two_free_sizes_stay() -> None:
    """No view can say them."""
    shapes = {"input": {0: Dim("batch", min=1, max=8), 2: Dim("depth", min=4, max=8)}}
    x = torch.randn(2, 4, 8, 12, 12)
    with quiet():
        program = torch.export.export(FLOATS["plain"].eval(), (x,), dynamic_shapes=shapes)
        program = program.run_decompositions({})
        rewrite(program)
    assert "aten.conv3d.default" in {str(node.target) for node in program.graph.nodes}


class Video(nn.Module):
    """Two convolutions, an activation between them, and a layer that reads a view of the result."""

    def __init__(self, convolution: nn.Module) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(3, 4, 1), convolution
        self.head = nn.Linear(convolution.out_channels, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x).relu()).relu()
        return self.head(x.flatten(2).transpose(1, 2))


@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Video(FLOATS[name]).eval()
    x = torch.randn(2, 3, 8, 12, 12)
    made = backquant.quantize(model, x, backend="xnnpack", calibration=[x], slower="keep")
    path = tmp_path / "model.pte"
    shapes = {"x": {0: "batch<=4"}}
    found = backquant.export(made, path, example_inputs=x, dynamic_shapes=shapes)
    assert found.integer_share == 1.0
    other = torch.randn(3, 3, 8, 12, 12)
    runs = ExecuTorchModel(path)
    with torch.no_grad():
        assert decibels(made(x), runs(x)) > 30
        assert decibels(made(other), runs(other)) > 30
