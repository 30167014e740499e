from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backquant.errors import InputError
from backquant.graph import as_arguments, check_inputs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, *, scale=1.0):
        return self.drop(self.norm(self.fc(x))) * scale


@pytest.mark.parametrize(
    "inputs", [torch.ones(4, 3), (torch.ones(4, 3),), [torch.ones(4, 3)], {"x": torch.ones(4, 3)}]
)
def test_fitting_inputs(inputs: Any) -> None:
    assert check_inputs(Net(), inputs).shape == (4, 2)


def test_nothing_changes() -> None:
    model = Net().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_inputs(model, torch.randn(4, 3) + 9)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_random_state_is_restored() -> None:
    model = Net().train()
    state = torch.get_rng_state()
    check_inputs(model, torch.ones(4, 3))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("inputs", "shown"),
    [
        (torch.ones(4, 5), "Net(float32[4, 5])"),
        ((torch.ones(4, 3), torch.ones(1)), "Net(float32[4, 3], float32[1])"),
        ({"y": torch.ones(4, 3)}, "Net(y=float32[4, 3])"),
        ((), "Net()"),
    ],
)
def test_inputs_that_do_not_fit(inputs: Any, shown: str) -> None:
    with pytest.raises(InputError, match="do not fit") as caught:
        check_inputs(Net(), inputs)
    assert caught.value.where.startswith(shown)
    assert caught.value.fix == "example_inputs=(x,)   # forward takes (x, *, scale=1.0)"


def test_inputs_of_another_type() -> None:
    with pytest.raises(InputError, match="do not fit") as caught:
        check_inputs(Net(), torch.ones(4, 3, dtype=torch.int64))
    assert caught.value.where.startswith("Net(int64[4, 3])")
    fix = "example_inputs=(x.float(),)   # float32 like the weights, not int64[4, 3]"
    assert caught.value.fix == fix


def test_named_tuples_are_one_argument() -> None:
    from collections import namedtuple

    pair = namedtuple("pair", "a b")(1, 2)
    assert as_arguments(pair) == ((pair,), {})
