"""Bicubic resizing to a known size runs in the delegate, as products."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.export import Dim

from applied import Applied, Function
from backquant.deploy.executorch import ExecuTorchModel
from backquant.deploy.executorch.lowering import lower_program
from backquant.deploy.executorch.rewrites import rewrite
from backquant.deploy.executorch.target import read_back
from backquant.deploy.program import Program
from backquant.graph.silence import quiet

INSIDE: dict[str, Function] = {
    "size": lambda x: F.interpolate(x, (9, 8), mode="bicubic"),
    "factor": lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"),
    "factors": lambda x: F.interpolate(x, scale_factor=(0.5, 3.0), mode="bicubic"),
    "corners": lambda x: F.interpolate(x, (5, 21), mode="bicubic", align_corners=True),
}


@pytest.mark.parametrize("free", [False, True])
@pytest.mark.parametrize("name", INSIDE)
def test_resizing_runs_in_the_delegate(name: str, free: bool) -> None:
    torch.manual_seed(0)
    model, x = Applied(INSIDE[name]).eval(), torch.randn(2, 3, 7, 12)
    shapes = ({0: Dim("n", max=4)},) if free else None
    with quiet(), torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=shapes)
        made = lower_program(Program(program, {})).buffer
        for batch in (x, x[:1]) if free else (x,):
            found = ExecuTorchModel(made)(batch)
            torch.testing.assert_close(found, model(batch), rtol=1e-4, atol=1e-4)
    assert read_back(made).portable == ()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.interpolate(x.double(), (9, 8), mode="bicubic"),
        lambda x: F.interpolate(x, (9, 8), mode="bicubic", antialias=True),
    ],
)
def test_others_are_left_alone(function: Function) -> None:
    with quiet(), torch.no_grad():
        program = torch.export.export(Applied(function), (torch.randn(2, 3, 7, 12),))
        program = program.run_decompositions({})
        before = [str(node.target) for node in program.graph.nodes]
        rewrite(program)
    assert [str(node.target) for node in program.graph.nodes] == before
