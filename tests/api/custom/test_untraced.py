"""Modules that are left whole, by name and by class, beside PyTorch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import backquant as bq
from backquant.errors import ConfigError
from backquant.prepare import prepared_state


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(int(x.shape[0] > 1) + 1):
            x = self.fc(x) if x.mean() < 0 else x
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.loops = nn.ModuleList([Loop(), Loop()])
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        for loop in self.loops:
            x = loop(x)
        return self.last(x)


def graph(prepared: Any) -> list[tuple[str, str]]:
    return [(node.op, str(node.target)) for node in prepared.graph.nodes]


@pytest.mark.parametrize("by", ["names", "classes", "both"])
def test_as_torchs(both: Any, by: str) -> None:
    model, x, prepared = Model().eval(), torch.randn(8, 4), []
    for side in (both.ours, both.theirs):
        custom = side.config.PrepareCustomConfig()
        if by == "names":
            custom.set_non_traceable_module_names(["loops.0", "loops.1"])
        elif by == "classes":
            custom.set_non_traceable_module_classes([Loop])
        else:
            custom.set_non_traceable_module_names(["loops.0"])
            custom.set_non_traceable_module_classes([Loop])
        prepared.append(both.feed(side.prepare(model, x, custom), x))
    ours, theirs = prepared
    assert graph(ours) == graph(theirs)
    assert torch.equal(both.ours.reference(ours)(x), both.theirs.reference(theirs)(x))
    plan = prepared_state(ours).plan
    assert plan.decisions["loops_0"].reasons[0].rule == "not-traced"
    quantized = bq.convert_fx(ours)
    assert [use.nodes for use in quantized.kernels] == [("first",), ("last",)]
    assert type(quantized.graph_module.loops.get_submodule("0")) is Loop


def test_names_that_are_not_there(both: Any, snapshot: Any) -> None:
    custom = bq.PrepareCustomConfig().set_non_traceable_module_names(["loop.0"])
    with pytest.raises(ConfigError) as caught:
        both.ours.prepare(Model().eval(), torch.randn(8, 4), custom)
    snapshot("untraced-misspelt", caught.value)
