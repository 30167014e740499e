"""Constant values: computed once, without touching observers."""

from __future__ import annotations

import torch
from torch import fx, nn

from backquant.convert.fold import Constants
from backquant.observe import MinMaxObserver


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.observer = MinMaxObserver()
        self.twice = nn.Linear(2, 2, bias=False)

    def forward(self, x):
        value = self.weight
        for _ in range(2000):
            value = value + 0.0
        value = self.twice(self.observer(value).t())
        return x @ value, torch.cat([value, x])


class Tracer(fx.Tracer):
    def is_leaf_module(self, m, path):
        return True


def test_long_chains_and_observers():
    model = Chain()
    module = fx.GraphModule(model, Tracer().trace(model))
    nodes = {node.name: node for node in module.graph.nodes}
    constants = Constants(module)
    found = constants.tensor(nodes["twice"])
    assert torch.equal(found, model.twice(model.weight.t()))
    assert not found.requires_grad
    assert model.observer.min_val == float("inf")
    assert constants.tensor(nodes["matmul"]) is None
    assert constants.tensor(nodes["cat"]) is None
    assert constants.tensor(nodes["twice"]) is not None


def test_values_are_computed_once():
    calls = []

    def count(x):
        calls.append(1)
        return x * 2

    graph = fx.Graph()
    weight = graph.get_attr("weight")
    doubled = graph.call_function(count, (weight,))
    graph.output(graph.call_function(torch.add, (doubled, doubled)))
    root = nn.Module()
    root.weight = nn.Parameter(torch.ones(1))
    module = fx.GraphModule(root, graph)
    constants = Constants(module)
    node = next(n for n in graph.nodes if n.target is torch.add)
    assert constants.tensor(node) == 4
    assert constants.tensor(doubled) == 2
    assert len(calls) == 1
