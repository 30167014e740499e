"""Orders and counts, which ExecuTorch has no kernels for: the values are the same, and they run."""

from __future__ import annotations

import pytest
import torch

from applied import Applied, Function
from backquant.deploy.executorch import ExecuTorchModel
from backquant.deploy.executorch.lowering import lower_program
from backquant.deploy.executorch.rewrites import rewrite
from backquant.deploy.executorch.target import read_back
from backquant.deploy.program import Program
from backquant.graph.silence import quiet

WRITTEN: dict[str, Function] = {
    "sort": lambda x: x.sort()[0],
    "sort-along-another-axis": lambda x: x.sort(0, descending=True).values,
    "sort-that-need-not-be-stable": lambda x: x.sort(dim=1, stable=False).indices.float(),
    "argsort": lambda x: x.argsort(-1).float(),
    "argsort-downwards": lambda x: torch.argsort(x, dim=0, descending=True, stable=False).float(),
    "order-of-integers": lambda x: (x * 5).to(torch.int64).flatten().sort()[0].float(),
    "histc": lambda x: torch.histc(x, 7, -1.5, 1.0),
    "histc-of-whole-numbers": lambda x: torch.histc(x.round(), 4, 0, 3),
    "histc-of-one-bin": lambda x: torch.histc(x, 1, 0, 1),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_orders_and_counts_run(name: str) -> None:
    torch.manual_seed(0)
    model, x = Applied(WRITTEN[name]).eval(), torch.randn(6, 30)
    with quiet(), torch.no_grad():
        made = lower_program(Program(torch.export.export(model, (x,)), {})).buffer
        assert torch.equal(ExecuTorchModel(made)(x), model(x))
    assert not {"aten::sort.values", "aten::histc.out"} & set(read_back(made).portable)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sort(dim=1, stable=True).values,
        lambda x: torch.histc(x, 4),
        lambda x: torch.histc(x.double(), 4, 0, 1),
    ],
)
def test_others_are_left_alone(function: Function) -> None:
    with quiet(), torch.no_grad():
        program = torch.export.export(Applied(function), (torch.randn(6, 30),))
        program = program.run_decompositions({})
        before = [str(node.target) for node in program.graph.nodes]
        rewrite(program)
    assert [str(node.target) for node in program.graph.nodes] == before
