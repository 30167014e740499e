"""Example inputs that do not fit, and what is said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backquant.calibrate.batches import called_on_example, example_from
from backquant.errors import InputError

_BATCHES = [(torch.ones(2, 3),), (torch.zeros(2, 3),)]


@pytest.mark.parametrize("given", [_BATCHES, _BATCHES[:1], [x for (x,) in _BATCHES]])
def test_batches_in_place_of_inputs(given: list[Any]) -> None:
    with pytest.raises(InputError) as caught:
        called_on_example(nn.Linear(3, 2), given)
    assert "calibration=batches" in caught.value.fix


def test_a_list_of_arguments_is_one_call() -> None:
    assert called_on_example(nn.Linear(3, 2), [torch.ones(2, 3)])


def test_a_loader_that_yields_labels_is_told_of_them() -> None:
    with pytest.raises(InputError) as caught:
        example_from(nn.Linear(3, 2), None, [[torch.ones(2, 3), torch.zeros(2)]])
    assert "without labels" in caught.value.fix


def test_the_models_own_error_is_shown_once() -> None:
    with pytest.raises(InputError) as caught:
        example_from(nn.Linear(3, 2), None, [torch.ones(2, 4)])
    first = caught.value.__cause__
    assert isinstance(first, RuntimeError) and first.__cause__ is first.__context__ is None
