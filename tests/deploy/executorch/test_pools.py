"""Maxima over axes, and pools: the values are the same, and they run in the delegate."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.export import Dim

from applied import Convolved, Function
from backquant.deploy.executorch import ExecuTorchModel
from backquant.deploy.executorch.lowering import lower_program
from backquant.deploy.executorch.target import read_back
from backquant.deploy.program import Program
from backquant.graph.silence import quiet

INSIDE: dict[str, Function] = {
    "max": lambda x: x.max(1)[0],
    "max-of-the-last": lambda x: x.max(-1, keepdim=True).values,
    "max-of-the-batch": lambda x: x.max(0).values,
    "max-as-xnnpack-has-it": lambda x: x.max(3, keepdim=True)[0],
    "max-of-three-dimensions": lambda x: x.flatten(2).max(2)[0],
    "max-of-five-dimensions": lambda x: x.unflatten(1, (2, 2)).max(2)[0],
    "max-in-another-order": lambda x: x.transpose(1, 3).unflatten(1, (2, -1)).max(2)[0],
    "max-pool-1d-in-another-order": lambda x: F.max_pool1d(x.flatten(2).transpose(1, 2), 2),
    "amax": lambda x: x.amax(3),
    "amax-of-images": lambda x: x.amax((-1, -2), keepdim=True),
    "amax-of-all": lambda x: x.amax(),
    "max-pool-1d": lambda x: F.max_pool1d(x.flatten(2), 3, 2, 1),
    "max-pool-1d-without-batch": lambda x: F.max_pool1d(x[0].flatten(1), 4),
    "avg-pool-1d": lambda x: F.avg_pool1d(x.flatten(2), 3),
    "adaptive-avg-pool-1d": lambda x: F.adaptive_avg_pool1d(x.flatten(2), 1),
    "adaptive-max-pool-1d": lambda x: F.adaptive_max_pool1d(x.flatten(2), 9),
    "max-pool-without-batch": lambda x: F.max_pool2d(x[0], 2),
    "avg-pool-without-batch": lambda x: F.avg_pool2d(x[0], 3, ceil_mode=False),
    "avg-pool-of-more-than-all": lambda x: F.avg_pool2d(x, 64, ceil_mode=True),
    "avg-pool-of-all-without-padding": lambda x: F.avg_pool2d(x, (6, 7), (5, 7), ceil_mode=True),
    "avg-pool-in-ceil-mode": lambda x: F.avg_pool2d(x, 2, ceil_mode=True),
    "max-pool-in-ceil-mode": lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True),
    "max-pool-in-ceil-mode-without-batch": lambda x: F.max_pool2d(x[0], 2, 2, ceil_mode=True),
    "adaptive-avg-pool": lambda x: F.adaptive_avg_pool2d(x, (3, 2)),
    "adaptive-max-pool": lambda x: F.adaptive_max_pool2d(x, 2),
}
OUTSIDE: dict[str, Function] = {
    "axes-apart": lambda x: x.amax((1, 3)),
    "places": lambda x: x.max(3)[1].float(),
    "windows-that-end-outside": lambda x: F.avg_pool2d(x, 5, 4, ceil_mode=True),
    "sizes-that-do-not-divide": lambda x: F.adaptive_avg_pool2d(x, 4),
}


def ran(function: Function, free: bool = False) -> list[str]:
    """The kernels outside of the delegates, once the values are seen to be right."""
    torch.manual_seed(0)
    model, x = Convolved(function).eval(), torch.randn(2, 4, 6, 6)
    shapes = {"x": {0: Dim("batch", min=1, max=8)}} if free else None
    with quiet(), torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=shapes)
        made = lower_program(Program(program, {})).buffer
        x = torch.randn(5, 4, 6, 6) if free else x
        torch.testing.assert_close(ExecuTorchModel(made)(x), model(x), rtol=1e-5, atol=1e-5)
    return list(read_back(made).portable)


@pytest.mark.parametrize("name", INSIDE)
def test_in_the_delegate(name: str) -> None:
    assert ran(INSIDE[name]) == []


@pytest.mark.parametrize("name", OUTSIDE)
def test_outside_of_the_delegate(name: str) -> None:
    assert ran(OUTSIDE[name]) != []


@pytest.mark.parametrize("name", ["max", "amax-of-images", "adaptive-max-pool"])
def test_with_a_free_batch(name: str) -> None:
    assert ran(INSIDE[name], free=True) == []


def test_over_a_free_axis() -> None:
    """The delegate's windows are of one size: it would read 8 values of the batch of 5."""
    assert ran(INSIDE["max-of-the-batch"], free=True) == ["aten::amax.out"]
