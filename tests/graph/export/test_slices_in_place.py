"""Slices that are changed in place: scattered where that is enough, else all is made functional."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from backquant.graph.export.capture import ExportOptions, capture_export
from backquant.operators.aten import AtenSpeller

Function = Callable[[torch.Tensor], Any]


def a_mask(x: torch.Tensor) -> Any:
    mask = x.new_zeros((6, 6))
    mask[0:2, 0:3], mask[2:, 3:], mask[1], mask[:, 2] = 1, 2, 5, 7
    return x.sum() * mask


def a_slice_that_is_read_on(x: torch.Tensor) -> Any:
    y = x * 2
    first = y[0]
    first[1:3] = 4
    return y + 1, first + 1, first


def slices_of_slices(x: torch.Tensor) -> Any:
    y = x * 2
    y[1:][:, 1:].fill_(3.0)
    y[2].mul_(2)
    return y, y[1:]


def an_old_slice(x: torch.Tensor) -> Any:
    y = x * 2
    before = y[:, 1:]
    y[0] = 1
    return y, before


def a_view(x: torch.Tensor) -> Any:
    y = x * 2
    flat = y.view(12)
    flat[3:5] = 1
    return y


def a_transposed_view(x: torch.Tensor) -> Any:
    y = x * 2
    z = y.t()
    z[0] = 3
    y[1] = 2
    return y, z


def changed_twice(x: torch.Tensor) -> Any:
    y = x * 2
    y += 1
    y.relu_()
    return y.flatten() + 1, y.t()


def operators_of_other_names(x: torch.Tensor) -> Any:
    y = x.abs() * 4
    y //= 2
    y.pow_(2)
    y.pow_(x.relu())
    y.transpose_(0, 1)
    return y


def a_slice_between_two_changes(x: torch.Tensor) -> Any:
    y = x * 2
    y += 1
    y[0] = 5
    y.mul_(2)
    return y.flatten() + 1, y[1]


def an_old_view_of_a_changed_one(x: torch.Tensor) -> Any:
    y = x * 2
    y += 1
    before = y.t()
    y.relu_()
    return before + 1, y


class Calls(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "is_local"),
    [
        (a_mask, True),
        (a_slice_that_is_read_on, True),
        (slices_of_slices, True),
        (an_old_slice, False),
        (a_view, False),
        (a_transposed_view, False),
        (changed_twice, True),
        (operators_of_other_names, True),
        (a_slice_between_two_changes, True),
        (an_old_view_of_a_changed_one, False),
    ],
)
def test_the_values_are_those_of_the_model(function: Function, is_local: bool) -> None:
    x, made = torch.randn(3, 4), []
    decompose = ExportedProgram.run_decompositions

    def noted(*args: Any, **kwargs: Any) -> ExportedProgram:
        made.append(args)
        return decompose(*args, **kwargs)

    with mock.patch.object(ExportedProgram, "run_decompositions", noted):
        captured = capture_export(Calls(function).eval(), x, AtenSpeller(), ExportOptions())
    captured.module.recompile()
    assert bool(made) != is_local
    torch.testing.assert_close(captured.module(x), function(x), rtol=0, atol=0)
