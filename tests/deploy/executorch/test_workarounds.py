"""Parts of values are slices: the values are the same, and they run in the delegate."""

from __future__ import annotations

import pytest
import torch
from torch.export import Dim

from applied import Convolved, Function
from backquant.deploy.executorch import ExecuTorchModel
from backquant.deploy.executorch.lowering import lower_program
from backquant.deploy.executorch.target import read_back
from backquant.deploy.program import Program
from backquant.graph.silence import quiet


def swapped(x: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, 1)
    return torch.cat((other, one.relu()), 1)


INSIDE: dict[str, Function] = {
    "chunk": swapped,
    "chunk-that-is-not-read": lambda x: x.chunk(2, 1)[1] * 2.0,
    "split": lambda x: torch.cat(x.split(4, -1)[::-1], 3),
    "split-by-sizes": lambda x: x.split((1, 3), 1)[1].tanh(),
    "split-along-another-axis": lambda x: x.split([5, 2], dim=-2)[1] + 1.0,
    "split-without-batch": lambda x: x[0].flatten(1).split(24, 1)[0] * 2.0,
    "select": lambda x: x.select(1, -1).relu(),
    "unbind": lambda x: x.unbind(1)[2].relu(),
}
OUTSIDE: dict[str, Function] = {
    "integers": lambda x: torch.cat(x.argmax(3).split(2, 1)[::-1], 1).float(),
    "empty": lambda x: x.split([0, 4], 1)[1].relu(),
}


@pytest.mark.parametrize("name", [*INSIDE, *OUTSIDE])
def test_parts(name: str) -> None:
    torch.manual_seed(0)
    model, x = Convolved({**INSIDE, **OUTSIDE}[name]).eval(), torch.randn(2, 4, 7, 9)
    with quiet(), torch.no_grad():
        made = lower_program(Program(torch.export.export(model, (x,)), {})).buffer
        torch.testing.assert_close(ExecuTorchModel(made)(x), model(x), rtol=1e-5, atol=1e-5)
    outside = [name for name in read_back(made).portable if "to_dim_order" not in name]
    assert (outside == []) is (name in INSIDE)


def test_splits_of_free_sizes_stay_one_operator() -> None:
    """The delegate takes no slices of them."""
    model, x = Convolved(swapped).eval(), torch.randn(2, 4, 7, 9)
    with quiet(), torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({0: Dim("n", max=4)},))
        made = lower_program(Program(program, {})).buffer
        for batch in (x, x[:1]):
            torch.testing.assert_close(
                ExecuTorchModel(made)(batch), model(batch), rtol=1e-5, atol=1e-5
            )
    assert read_back(made).portable == ("aten::split_with_sizes_copy.out",)
