"""A model of which nothing is lowered, and which calls little, runs without recordings."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import backquant
from backquant import QConfigMapping
from backquant.errors import InputError
from backquant.runtime import QuantizedModel


def converted(model: nn.Module) -> QuantizedModel:
    prepared = backquant.prepare_fx(
        model.eval(), QConfigMapping(), torch.randn(2, 4), backend_config="x86"
    )
    return backquant.convert_fx(prepared)


def test_it_gives_what_the_float_model_gives_and_records_nothing() -> None:
    cell, x = nn.Sequential(nn.GRUCell(4, 3)), torch.randn(2, 4, requires_grad=True)
    model = converted(cell)
    for made in (model, copy.deepcopy(model)):
        assert made.kernels == ()
        for _ in range(3):
            got = made(x)
            assert torch.equal(cell(x), got)
            assert not got.requires_grad
        assert made.replays is None


def test_many_calls_are_recorded() -> None:
    model = converted(nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]))
    assert model.kernels == ()
    for _ in range(3):
        model(torch.randn(2, 4))
    assert model.replays.programs == 1


def test_hooks_errors_and_autocast_are_as_elsewhere() -> None:
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)
    model, seen = converted(layer), []
    model.graph_module.register_forward_hook(lambda *_: seen.append(1))
    wanted = model(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = model(x)
    assert seen == [1, 1]
    assert torch.equal(wanted, got)
    with pytest.raises(InputError):
        model(torch.randn(2, 5))
