from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from backquant.runtime.replay.record import NotReplayable, Recording, Ref, known_constants, record


def test_a_number_that_python_reads_refuses() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1

    result, recording = record(branch, (torch.ones(2),), {}, list)
    assert isinstance(recording, NotReplayable)
    assert result.tolist() == [2, 2]  # the call itself is not disturbed


def test_a_constant_that_no_tensor_decides_is_not_recorded() -> None:
    def promoted(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.promote_types(torch.float32, torch.float64))

    result, recording = record(promoted, (torch.ones(1),), {}, list)
    assert result.dtype == torch.float64
    assert isinstance(recording, Recording)
    assert [str(call.operator) for call in recording.calls] == ["aten._to_copy.default"]


def test_a_tensor_made_outside_torch_refuses() -> None:
    def through_numpy(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.flip(x.numpy()).copy()) + x

    result, recording = record(through_numpy, (torch.arange(3),), {}, list)
    assert isinstance(recording, NotReplayable) and "numpy reads" in str(recording)
    assert result.tolist() == [2, 2, 2]


def test_constants_of_the_model_are_held_and_nothing_else() -> None:
    linear = nn.Linear(2, 3)
    with torch.no_grad():
        _, recording = record(linear, (torch.ones(1, 2),), {}, lambda: known_constants(linear))
    assert isinstance(recording, Recording)
    assert {id(t) for t in recording.constants.values()} == {id(p) for p in linear.parameters()}


def test_structures_of_arguments_and_results_are_kept() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    _, recording = record(lambda a, b: {"sum": a + b, "both": [a, 3]}, (x,), {"b": y}, list)
    assert isinstance(recording, Recording)
    assert recording.inputs == ("%0", "%1")
    assert recording.result == {"sum": Ref("%2"), "both": [Ref("%0"), 3]}


def test_the_same_tensor_twice_is_one_input() -> None:
    x = torch.ones(2)
    _, recording = record(torch.add, (x, x), {}, list)
    assert isinstance(recording, Recording)
    assert recording.inputs == ("%0",)
    assert recording.calls[0].arguments[:2] == (Ref("%0"), Ref("%0"))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i: torch.cat(torch.tensor_split(x, i)[::-1]),
        lambda x, i: x[: i.tolist()[0]] + 1,
        lambda x, i: x[torch.nonzero(i).squeeze(1)].view(-1),
        lambda x, i: x[i > 0],
    ],
)
def test_sizes_that_values_decide_are_not_recorded(function):
    """The dispatcher shows neither ``tolist`` nor the places of ``tensor_split``: slices of fixed numbers."""
    _, problem = record(function, (torch.ones(2, 3), torch.tensor([1, 2])), {}, list)
    assert isinstance(problem, NotReplayable), problem


def test_a_gather_of_fixed_size_is_recorded():
    x, index = torch.arange(4.0), torch.tensor([1, 2])
    _, recording = record(lambda x, i: x[i] + torch.tensor_split(x, 2)[0], (x, index), {}, list)
    assert isinstance(recording, Recording), recording


def test_branches_that_values_take_are_not_recorded() -> None:
    def branches(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))

    result, recording = record(branches, (torch.ones(2),), {}, list)
    assert isinstance(recording, NotReplayable) and "cond" in str(recording)
    assert result.tolist() == [2, 2]
    assert branches(-torch.ones(2)).tolist() == [-2, -2]
