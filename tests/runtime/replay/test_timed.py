"""Times of nodes, by a clock that counts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

import backquant
from backquant.runtime.replay.timed import NodeTimes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.two(torch.relu(self.one(x))))
        return self.last(y).chunk(2, 1)[1]


class Counter:
    """A clock that says one second, and remembers what it timed."""

    def __init__(self) -> None:
        self.results: list[object] = []

    def __call__(self, run: Callable[[], object]) -> float:
        self.results.append(run())
        return float(len(self.results))


def lowered(model: nn.Module, example: torch.Tensor) -> GraphModule:
    return backquant.quantize(model, example, calibration=[example]).graph_module


def test_nodes_that_do_the_same_are_measured_once() -> None:
    clock = Counter()
    times = NodeTimes(symbolic_trace(Net().eval()), (torch.randn(3, 8),))
    times.measure(clock)
    assert not times.refused
    assert times.seconds["one"] == times.seconds["two"] != times.seconds["last"]
    assert times.seconds["relu"] == times.seconds["relu_1"]
    # an empty program, two kinds of linear layers, a ReLU, the split; taking a part of it is no operator
    assert len(clock.results) == 5, clock.results


def test_what_was_timed_does_not_run_again() -> None:
    """A clock that calls nothing still leaves the tensors for what follows."""
    net, calls = Net().eval(), []
    times = NodeTimes(symbolic_trace(net), (torch.randn(3, 8),), packs=False)
    for part in times._parts:
        run = part.program
        part.program = lambda tensors, run=run: calls.append(1) or run(tensors)  # type: ignore
    times.measure(lambda run: float(run() is not None))
    parts = len(times._parts)
    assert len(calls) == parts == 6
    times.measure(lambda run: 1.0)
    assert len(calls) == 2 * parts


def test_a_lowered_graph_is_measured_by_its_nodes() -> None:
    x = torch.randn(3, 8)
    module = lowered(Net(), x)
    times = NodeTimes(module, (x,))
    times.measure(lambda run: 2.0 if isinstance(run(), tuple) else 1.0)
    assert not times.refused
    calls = {n.name for n in module.graph.nodes if n.op.startswith("call_")}
    assert {"relu_lowered", "relu_1_lowered", "last_lowered"} <= set(times.seconds) <= calls


def test_parts_compute_what_the_whole_computes() -> None:
    """The tensors that each part is timed on are those of the model."""
    x = torch.randn(3, 8)
    module = lowered(Net(), x)
    times = NodeTimes(module, (x,))
    results: list[torch.Tensor] = []

    def clock(run: Callable[[], object]) -> float:
        found = run()
        results.extend(found if isinstance(found, tuple) else ())
        return 0.0

    times.measure(clock)
    whole = module(x)
    assert any(
        r.shape == whole.shape and torch.equal(r, whole) for r in results if not r.is_quantized
    )


def test_the_least_of_several_measurements_counts() -> None:
    times = NodeTimes(symbolic_trace(nn.Sequential(nn.ReLU())), (torch.randn(2),))
    for seconds in (3.0, 1.0, 2.0):
        times.measure(lambda run, s=seconds: s if isinstance(run(), tuple) else 0.0)
    assert times.seconds == {"_0": 1.0}


def test_what_cannot_be_recorded_is_measured_as_it_runs() -> None:
    def reads(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) * x.sum().item()

    times = NodeTimes(symbolic_trace(reads), (torch.randn(2),))
    assert "_local_scalar_dense" in times.refused
    times.measure(lambda run: 1.0 if run() is not None else 0.0)
    assert times.seconds == {"relu": 1.0, "sum_1": 1.0, "item": 1.0, "mul": 1.0}
    assert set(times.sizes) == {"x", "relu", "sum_1", "mul"}


def test_keyword_arguments_and_defaults() -> None:
    def add(x: torch.Tensor, y: torch.Tensor | None = None, scale: float = 2.0) -> torch.Tensor:
        return torch.relu(x) * scale

    times = NodeTimes(symbolic_trace(add), (), {"x": torch.ones(2)})
    times.measure(lambda run: float(run() is not None))
    assert set(times.seconds) == {"relu", "mul"}


def test_what_takes_long_is_measured_node_by_node_and_like_calls_once() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4), nn.ReLU())
    calls = []

    def clock(run: object) -> float:
        calls.append(run)
        return 0.0 if run() is None else 2.0  # type: ignore[operator]

    times = NodeTimes(symbolic_trace(layers), (torch.randn(3, 8),), packs=False, walks=True)
    assert times.is_walked and not times.refused
    times.measure(clock)
    assert times.seconds == {"_0": 2.0, "_1": 2.0, "_2": 2.0, "_3": 2.0}
    assert times.sizes == {"input_1": 24, "_0": 24, "_1": 24, "_2": 12, "_3": 12}
    assert len(calls) == 4  # nothing; both layers of one shape; the other; and the ReLU


def test_short_graphs_are_recorded() -> None:
    assert not NodeTimes(symbolic_trace(Net().eval()), (torch.randn(3, 8),), walks=None).is_walked
