"""Stubs of eager-mode models: traced through, as in PyTorch, in prepare and convert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.quantization as tq
from torch import nn

import backquant as bq
from backquant.nn import DeQuantStub, QuantStub, QuantWrapper


class Stubs(nn.Module):
    """A model as it is written for eager mode; ``kind`` gives the stubs."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.quant = kind.QuantStub()
        self.fc = nn.Linear(4, 4)
        self.relu = nn.ReLU()
        self.dequant = kind.DeQuantStub()
        self.tail = nn.Softplus()

    def forward(self, x):
        return self.tail(self.dequant(self.relu(self.fc(self.quant(x)))))


def graph(prepared: Any) -> list[tuple[str, str]]:
    return [(node.op, str(node.target)) for node in prepared.graph.nodes]


@pytest.mark.parametrize("kind", [tq, bq.nn], ids=["torch", "ours"])
def test_stubs_vanish(both: Any, kind: Any) -> None:
    weights = Stubs(tq).eval()
    model, x = Stubs(kind).eval(), torch.randn(8, 4)
    model.load_state_dict(weights.state_dict())
    ours = both.feed(both.ours.prepare(model, x), x)
    theirs = both.feed(both.theirs.prepare(weights, x), x)
    assert graph(ours) == graph(theirs)
    assert not any("stub" in target or target == "quant" for _, target in graph(ours))
    assert torch.equal(both.ours.reference(ours)(x), both.theirs.reference(theirs)(x))
    assert (bq.convert_fx(ours)(x) - model(x)).abs().max() < 0.05


def test_wrapper(both: Any) -> None:
    x = torch.randn(8, 4)
    inner = nn.Linear(4, 4)
    ours = both.ours.prepare(QuantWrapper(inner).eval(), x)
    theirs = both.theirs.prepare(tq.QuantWrapper(inner).eval(), x)
    assert graph(ours) == graph(theirs)
    assert [use.nodes for use in bq.convert_fx(both.feed(ours, x)).kernels] == [("module",)]


def test_stubs_in_standalone_modules(both: Any) -> None:
    model, x = nn.Sequential(Stubs(bq.nn), nn.Linear(4, 2)).eval(), torch.randn(8, 4)
    custom = bq.PrepareCustomConfig().set_standalone_module_name("0", None, (x,))
    prepared = both.feed(both.ours.prepare(model, x, custom), x)
    assert "quant" not in dict(prepared.get_submodule("0").named_children())
    assert len(bq.convert_fx(prepared).kernels) == 2


def test_a_stub_that_is_left_whole_is_a_float_module(both: Any) -> None:
    model, x = Stubs(bq.nn).eval(), torch.randn(8, 4)
    custom = bq.PrepareCustomConfig().set_non_traceable_module_classes([QuantStub, DeQuantStub])
    prepared = both.feed(both.ours.prepare(model, x, custom), x)
    plan = prepared.meta["backquant"].plan
    assert plan.decisions["quant"].reasons[0].rule == "not-traced"
    assert len(bq.convert_fx(prepared).kernels) == 1
