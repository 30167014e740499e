"""Shapes measured by a run: lazily, without changing the model, and by the names of the graph."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from backquant.graph.shapes import GraphValues, TensorFacts, values_of


def test_values_of_tuples_are_those_of_their_items() -> None:
    gm = fx.symbolic_trace(lambda x: torch.split(x, 2, dim=1)[0] + 1)
    found = values_of(gm, torch.zeros(3, 4))
    assert found["getitem"].shape == found["add"].shape == (3, 2)
    assert "split" not in found


def test_a_run_changes_no_buffer_and_no_mode() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2)).train()
    gm = fx.symbolic_trace(model)
    assert values_of(gm, torch.ones(1, 2))["_0"].shape == (1, 2)
    assert model[0].running_mean.tolist() == [0, 0] and model.training


def test_inputs_that_do_not_fit_tell_nothing() -> None:
    gm = fx.symbolic_trace(nn.Linear(3, 2))
    assert values_of(gm, torch.zeros(1, 4)) == {}


def test_nothing_runs_until_it_is_asked_for() -> None:
    calls = []

    class Counted(nn.Module):
        def forward(self, x):
            return x

    counted = Counted()
    counted.register_forward_hook(lambda *_: calls.append(1))
    graph = fx.Graph()
    graph.output(graph.call_module("m", (graph.placeholder("x"),)))
    gm = fx.GraphModule({"m": counted}, graph)
    values = GraphValues(gm, torch.zeros(2))
    assert calls == [] and values.seen() == {}
    assert values.of("m") == TensorFacts((2,), torch.float32) and values.of("none") is None
    assert len(calls) == 1 and {"x", "m"} <= set(values.seen())


def test_a_fused_operator_has_the_value_of_its_last_part() -> None:
    gm = fx.symbolic_trace(lambda x: torch.relu(x.flatten(1)))
    values = GraphValues(gm, torch.zeros(2, 3, 4)).renamed({"x": "relu"})
    assert values.of("x").shape == (2, 12)
    assert values.seen()["x"].shape == (2, 12)


@pytest.mark.parametrize(
    ("function", "wide"),
    [
        (lambda x: x.double() + 1, True),
        (lambda x: x.to(torch.float64), True),
        (lambda x: torch.fft.rfft(x).abs(), True),
        (lambda x: x.float() + 1, False),
        (lambda x: x.to(torch.bfloat16), False),
    ],
)
def test_a_graph_says_by_itself_whether_numbers_get_wider(function, wide: bool) -> None:
    values = GraphValues(fx.symbolic_trace(function), torch.zeros(2, 4))
    assert values.may_be_wide is wide and values.seen() == {}
    assert values.renamed({"a": "b"}).may_be_wide is wide


def test_integers_are_known_under_the_names_of_fused_operators() -> None:
    """They were lost where anything was fused."""
    gm = fx.symbolic_trace(lambda ids, x: (ids + 3, x + 1))
    values = GraphValues(gm, (torch.tensor([1]), torch.ones(1))).renamed({"x": "add_1"})
    assert values.integers == {"ids", "add"}
