"""Convolutions of one channel with a free batch: the same values, and packages that compute them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import backquant
from backquant.backend_config import QDQRules
from backquant.deploy.inductor.workarounds import with_two_channels
from backquant.deploy.portable import portable
from backquant.deploy.program import export_program


def _channels(model: nn.Module, x: torch.Tensor, free: bool) -> list[int]:
    """What each convolution reads, once the values are seen to stay."""
    torch.manual_seed(0)
    made = backquant.quantize(model.eval(), backend="inductor_x86", calibration=[x])
    shapes = ({0: Dim("batch", min=1, max=64)},) if free else None
    graph = portable(made.graph_module, QDQRules())
    program = export_program(graph, (x,), {}, shapes)
    wanted = program.exported.module()(x)
    with_two_channels(program)
    assert torch.equal(program.exported.module()(x), wanted)
    nodes = program.exported.graph.find_nodes(
        op="call_function", target=torch.ops.aten.conv2d.default
    )
    return [node.args[0].meta["val"].shape[1] for node in nodes]


def test_only_free_sizes_of_one_channel_are_widened() -> None:
    x = torch.randn(2, 1, 8, 8)
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3))
    assert _channels(model, x, free=True) == [2, 4]
    assert _channels(model, x, free=False) == [1, 4]


@pytest.mark.parametrize("layer", [nn.Conv2d(1, 8, 3, 2), nn.Conv1d(1, 8, 10, 5)])
def test_a_package_with_a_free_batch(layer: nn.Module, tmp_path: Path) -> None:
    """Refused before: AOTInductor computed wrong numbers, 0 dB."""
    torch.manual_seed(0)
    x = torch.randn(2, 1, 16, 16) if isinstance(layer, nn.Conv2d) else torch.randn(2, 1, 160)
    model = nn.Sequential(layer, nn.GELU(), nn.Flatten(2), nn.Linear(49 if x.dim() == 4 else 31, 4))
    made = backquant.quantize(model.eval(), x, backend="inductor_x86", calibration=[x])
    path = tmp_path / "model.pt2"
    shapes = {"input": {0: "batch"}}
    assert backquant.export(made, path, example_inputs=x, dynamic_shapes=shapes).integer_share == 1
    runs = torch._inductor.aoti_load_package(str(path))
    other = torch.randn(5, *x.shape[1:])
    with torch.no_grad():
        torch.testing.assert_close(runs(other), made(other), rtol=0, atol=0.05)
