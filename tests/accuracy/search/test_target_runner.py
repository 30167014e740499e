"""What parts of a model take in a runtime, from profiles and from wholes."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx, nn

from backquant.accuracy.search.runners import TargetRunner, as_wholes
from backquant.match.slower import Costs, Unit, Value, total

COSTS = Costs(
    (Unit((0,), 8.0, 10.0), Unit((1,), 4.0, 10.0)),
    (Value(None, (0,), 3.0, 3.0), Value(0, (1,), 1.0, 1.0), Value(1, (None,), 3.0, 3.0)),
)


@pytest.mark.parametrize("floating", [15.0, 20.0, 30.0])
@pytest.mark.parametrize("integer", [6.0, 12.0, 40.0])
def test_parts_sum_up_to_both_wholes(floating: float, integer: float) -> None:
    """Where a whole is shorter than its parts in the profile, too, and where float takes long beside them."""
    parts = as_wholes(COSTS, floating, integer)
    everything = frozenset(range(len(COSTS.units)))
    assert parts.outside + total(parts.costs, everything) == pytest.approx(floating)
    assert parts.outside + total(parts.costs, frozenset()) == pytest.approx(integer)


def test_layers_that_a_profile_does_not_name_are_none_of_what_integers_take() -> None:
    """A float profile that names one layer of many: the others are units in float, not outside of them."""
    unnamed = Costs((Unit((0,), 8.0, 10.0), Unit((1,), 4.0, 0.0)))
    parts = as_wholes(unnamed, 100.0, 15.0)
    assert parts.outside == 3.0
    assert total(parts.costs, frozenset({0, 1})) == 97.0
    nothing = Costs((Unit((0,), 8.0, 0.0), Unit((1,), 4.0, 0.0)))
    assert [unit.floating for unit in as_wholes(nothing, 40.0, 12.0).costs.units] == [20.0, 20.0]


def test_a_value_that_stays_inside_costs_nothing() -> None:
    costs = Costs((Unit((0,), 8.0, 10.0, gives_float=True),))
    assert as_wholes(costs, 12.0, 11.0).outside == 2.0


class _Session:
    def times(self, _: Any, __: int) -> dict[str, float]:
        return {"a": 6.0, "": 2.0}


class _Runs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def session(self, _: Any) -> _Session:
        return _Session()

    def inputs(self, _: Any) -> list[Any]:
        return []


@pytest.mark.parametrize(("call", "own"), [(4.0, 3e6), (20.0, 6e6)])
def test_a_profile_takes_what_a_call_takes_at_most(
    call: float, own: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = TargetRunner(None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(runner, "runnable", lambda _: _Runs())
    monkeypatch.setattr(TargetRunner, "clock", staticmethod(lambda _: call))
    assert runner.by_node(None, torch.zeros(1))["a"] == own


def test_what_computes_the_same_is_exported_once() -> None:
    """A model with nothing quantized, as it came and by the names of a plan."""
    torch.manual_seed(0)
    plain = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    again, other = copy.deepcopy(plain), copy.deepcopy(plain)
    with torch.no_grad():
        other.get_parameter("0.weight").mul_(2)
    runner: Any = TargetRunner(None, None)  # type: ignore[arg-type]
    models: list[Any] = [SimpleNamespace(graph_module=graph) for graph in (plain, again, other)]
    runs = [runner.runnable(made) for made in models]
    assert runs[1] is runs[0] and runs[2] is not runs[0]
    assert runner.runnable(models[0]) is runs[0]
