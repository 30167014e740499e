"""A large depthwise convolution in float is a sum of convolutions that XNNPACK has kernels for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

from backquant.deploy.executorch import ExecuTorchModel
from backquant.deploy.executorch.lowering import lower_program
from backquant.deploy.executorch.rewrites import rewrite
from backquant.deploy.executorch.workarounds import MOST_TAPS
from backquant.deploy.program import Program
from backquant.graph.silence import quiet
from backquant.operators import overloads

CONVOLUTIONS = {
    "square": nn.Conv2d(6, 6, 7, padding=3, groups=6),
    "without-bias": nn.Conv2d(6, 6, 7, groups=6, bias=False),
    "stride": nn.Conv2d(6, 6, 7, stride=(2, 3), padding=(3, 1), groups=6),
    "dilation": nn.Conv2d(6, 6, (7, 5), dilation=(1, 2), padding=4, groups=6),
    "two-of-each": nn.Conv2d(6, 12, 7, padding=3, groups=6),
    "wide": nn.Conv2d(6, 6, (3, 31), padding=(1, 15), groups=6),
}
AS_THEY_ARE = {
    "small": nn.Conv2d(6, 6, 5, groups=6),
    "groups": nn.Conv2d(6, 6, 7, groups=3),
    "one-channel": nn.Conv2d(1, 6, 7),
}


def windows(model: nn.Module, x: torch.Tensor, **more: object) -> list[int]:
    """The taps of the convolutions that a program has after the rules."""
    with quiet(), torch.no_grad():
        program = torch.export.export(model, (x,), **more).run_decompositions({})
        rewrite(program)
        torch.testing.assert_close(program.module()(x), model(x), rtol=1e-5, atol=1e-5)
    calls = (n for n in program.graph.nodes if n.target in overloads("conv2d"))
    return [n.args[1].meta["val"].shape[2:].numel() for n in calls]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_parts(name: str) -> None:
    torch.manual_seed(0)
    model, x = CONVOLUTIONS[name].eval(), torch.randn(2, 6, 16, 36)
    taps = windows(model, x)
    assert max(taps) <= MOST_TAPS
    assert sum(taps) == model.weight.shape[2:].numel()
    with quiet(), torch.no_grad():
        made = lower_program(Program(torch.export.export(model, (x,)), {})).buffer
        torch.testing.assert_close(ExecuTorchModel(made)(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", AS_THEY_ARE)
def test_others_stay(name: str) -> None:
    model = AS_THEY_ARE[name].eval()
    x = torch.randn(2, model.in_channels, 16, 16)
    assert windows(model, x) == [model.weight.shape[2:].numel()]


def test_a_free_batch_stays() -> None:
    """XNNPACK cuts tensors of known sizes only."""
    shapes = {"input": {0: Dim("batch", min=1, max=8)}}
    x = torch.randn(2, 6, 16, 16)
    assert windows(CONVOLUTIONS["square"].eval(), x, dynamic_shapes=shapes) == [49]
