from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from backquant.graph import alike


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(self.first(x), self.second(x), alpha=2).reshape(-1)


def net() -> _Net:
    torch.manual_seed(0)
    return _Net()


def renamed(graph: fx.GraphModule) -> fx.GraphModule:
    for node in graph.graph.nodes:
        node.name = f"other_{node.name}"
    return graph


def changed(change: Callable[[_Net], object]) -> fx.GraphModule:
    model = net()
    change(model)
    return fx.symbolic_trace(model)


def test_names_do_not_count() -> None:
    assert alike(fx.symbolic_trace(net()), renamed(fx.symbolic_trace(net())))


def swapped() -> fx.GraphModule:
    """The sum of the layers the other way round."""
    graph = fx.symbolic_trace(net())
    [total] = (node for node in graph.graph.nodes if node.target is torch.add)
    total.args = total.args[::-1]
    return graph


def with_alpha() -> fx.GraphModule:
    graph = fx.symbolic_trace(net())
    [total] = (node for node in graph.graph.nodes if node.target is torch.add)
    total.kwargs = {"alpha": 3}
    return graph


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: changed(lambda m: m.first.weight.data.mul_(1.01)), id="a weight"),
        pytest.param(
            lambda: changed(lambda m: setattr(m, "second", nn.Linear(4, 4, bias=False))),
            id="a layer",
        ),
        pytest.param(swapped, id="the order of arguments"),
        pytest.param(with_alpha, id="a number"),
        pytest.param(lambda: fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4))), id="the length"),
    ],
)
def test_what_counts(other: Callable[[], fx.GraphModule]) -> None:
    own = fx.symbolic_trace(net())
    assert not alike(own, other()) and not alike(other(), own)
    assert alike(own, copy.deepcopy(own))
