"""Functions that a trace keeps whole: which are taken apart, and what runs then."""

from __future__ import annotations

import operator
import random

import pytest
import torch
from torch import fx, nn

import backquant
from backquant.graph import Scope, capture, inline_wrapped


def halved(x: torch.Tensor, training: bool) -> torch.Tensor:
    return x * torch.rand(1) if training else x / 2


def by_value(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def by_chance(x: torch.Tensor) -> torch.Tensor:
    return x * random.choice([1, 2])


def with_noise(x: torch.Tensor) -> torch.Tensor:
    return x + float(torch.rand(1))


for name in ("halved", "by_value", "by_chance", "with_noise"):
    fx.wrap(name)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(halved(self.fc(x), self.training))


def test_it_is_its_operators_in_the_scope_of_the_call() -> None:
    captured = capture(Net().eval())
    scope = captured.scopes["halved"]
    inline_wrapped(captured.module, captured.scopes)
    names = [node.name for node in captured.module.graph.nodes]
    assert names == ["x", "fc", "truediv", "fc_1", "output"]
    assert captured.scopes["truediv"] == scope
    assert "halved" not in captured.scopes


@pytest.mark.parametrize("function", [by_value, by_chance, with_noise])
def test_what_looks_at_values_or_draws_numbers_stays(function: object) -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(function, (graph.placeholder("x"),)))
    before = random.getstate(), torch.get_rng_state()
    inline_wrapped(module := fx.GraphModule({}, graph), {})
    assert [node.target for node in module.graph.nodes][1] is function
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_what_is_named_stays() -> None:
    captured = capture(Net().eval())
    inline_wrapped(captured.module, captured.scopes, [halved])
    assert "halved" in captured.scopes


def test_a_quantized_model_is_recorded() -> None:
    """A function of somebody may do what a recording does not see: the model was never replayed."""
    x = torch.randn(3, 4)
    model = backquant.quantize(Net().eval(), x, calibration=[x], slower="keep")
    for _ in range(3):
        model(x)
    assert model.replays.programs == 1


def halves(x):
    return x[:2] * 2, x[2:] * 3


def test_several_results_are_those_that_are_read() -> None:
    halves.__module__ = "somebody"
    graph = fx.Graph()
    both = graph.call_function(halves, (graph.placeholder("x"),))
    items = [graph.call_function(operator.getitem, (both, index)) for index in (0, 1)]
    graph.output(graph.call_function(torch.cat, (items,)))
    module = fx.GraphModule({}, graph)
    scopes = {node.name: Scope("", None) for node in graph.nodes}
    inline_wrapped(module, scopes)
    assert {node.name for node in module.graph.nodes} == set(scopes)
    assert halves not in {node.target for node in module.graph.nodes}
    module.recompile()
    assert module(torch.ones(4)).tolist() == [2, 2, 3, 3]
