"""Pools and resizing of volumes, axis after axis: the same values, by kernels that ExecuTorch has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.export import Dim

from applied import Applied, Function
from backquant.deploy.executorch import ExecuTorchModel
from backquant.deploy.executorch.lowering import lower_program
from backquant.deploy.executorch.rewrites import rewrite
from backquant.deploy.program import Program
from backquant.graph.silence import quiet

TAKEN: dict[str, Function] = {
    "largest": lambda x: F.max_pool3d(x, 2),
    "largest-of-images": lambda x: F.max_pool3d(x, (1, 3, 3), (1, 2, 2), (0, 1, 1)),
    "largest-of-depths": lambda x: F.max_pool3d(x, (3, 1, 1), 2, (1, 0, 0)),
    "largest-dilated": lambda x: F.max_pool3d(x, 2, 1, 0, (2, 1, 2)),
    "largest-in-ceil-mode": lambda x: F.max_pool3d(x, 3, 2, ceil_mode=True),
    "means": lambda x: F.avg_pool3d(x, (2, 3, 1)),
    "means-with-padding": lambda x: F.avg_pool3d(x, 3, 2, 1),
    "means-without-padding": lambda x: F.avg_pool3d(x, 3, 2, 1, count_include_pad=False),
    "means-in-ceil-mode": lambda x: F.avg_pool3d(x, 3, 2, 1, ceil_mode=True),
    "all": lambda x: F.adaptive_avg_pool3d(x, 1),
    "parts": lambda x: F.adaptive_avg_pool3d(x, (4, 2, 3)),
    "uneven-parts": lambda x: F.adaptive_avg_pool3d(x, (3, 5, 2)),
    "largest-of-parts": lambda x: F.adaptive_max_pool3d(x, (4, 3, 2)),
    "nearest": lambda x: F.interpolate(x, scale_factor=(2, 1, 3)),
    "nearest-to-sizes": lambda x: F.interpolate(x, (5, 9, 13)),
    "linear": lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
    "linear-to-sizes": lambda x: F.interpolate(x, (5, 9, 13), mode="trilinear"),
    "linear-by-corners": lambda x: F.interpolate(
        x, (5, 9, 13), mode="trilinear", align_corners=True
    ),
}
LEFT: dict[str, Function] = {
    "places": lambda x: F.adaptive_max_pool3d(x, 2, return_indices=True)[1].float(),
    "another-divisor": lambda x: F.avg_pool3d(x, 2, divisor_override=3),
}


def rewritten(function: Function, x: torch.Tensor, free: int | None = None) -> set[str]:
    """The operators of the rewritten program, once its values are seen to be right."""
    size = Dim("n", min=4, max=64) if free else Dim("n", min=1, max=8)
    more: Any = {} if free is None else {"dynamic_shapes": {"x": {free: size}}}
    with quiet(), torch.no_grad():
        program = torch.export.export(Applied(function), (x,), **more).run_decompositions({})
        rewrite(program)
        torch.testing.assert_close(program.module()(x), function(x), rtol=1e-5, atol=1e-5)
    return {str(node.target) for node in program.graph.nodes}


@pytest.mark.parametrize("name", TAKEN)
def test_values_stay(name: str) -> None:
    x = torch.randn(2, 3, 8, 6, 12)
    assert not any("3d" in each for each in rewritten(TAKEN[name], x))


@pytest.mark.parametrize("name", TAKEN)
def test_values_stay_with_a_free_batch(name: str) -> None:
    x = torch.randn(3, 2, 8, 6, 12)
    assert not any("3d" in each for each in rewritten(TAKEN[name], x, free=0))


@pytest.mark.parametrize("name", ["largest", "means-with-padding", "all", "parts"])
def test_a_volume_without_samples(name: str) -> None:
    x = torch.randn(3, 8, 6, 12)
    assert not any("3d" in each for each in rewritten(TAKEN[name], x))


@pytest.mark.parametrize("name", LEFT)
def test_others_stay(name: str) -> None:
    x = torch.randn(2, 3, 8, 6, 12)
    assert any("3d" in each for each in rewritten(LEFT[name], x))


def test_values_stay_with_free_columns() -> None:
    x = torch.randn(2, 3, 8, 6, 12)
    assert not any("3d" in each for each in rewritten(TAKEN["largest"], x, free=4))


@pytest.mark.parametrize(
    "name", ["largest", "means-in-ceil-mode", "parts", "largest-of-parts", "linear"]
)
def test_run(name: str) -> None:
    torch.manual_seed(0)
    model, x = Applied(TAKEN[name]).eval(), torch.randn(2, 3, 8, 6, 12)
    with quiet(), torch.no_grad():
        made = lower_program(Program(torch.export.export(model, (x,)), {})).buffer
        torch.testing.assert_close(ExecuTorchModel(made)(x), model(x), rtol=1e-5, atol=1e-5)
