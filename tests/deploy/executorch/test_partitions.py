"""Partitions that can be cut out one after the other, and programs that ExecuTorch alone cannot cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx, nn

import backquant
from backquant.deploy.executorch import ExecuTorchModel
from backquant.deploy.executorch.lowering import by_levels, can_be_cut_out


def crossing(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each of two parts, {left, left_again} and {right, right_again}, reads a result of the other."""
    left, right = x + 1, x + 2
    return left + right.exp(), right * left.exp()


def calls(module: fx.GraphModule) -> dict[str, fx.Node]:
    return {n.name: n for n in module.graph.nodes if n.op in ("call_function", "call_method")}


def test_two_parts_that_read_each_other_are_divided_by_levels() -> None:
    module = fx.symbolic_trace(crossing)
    node = calls(module)
    parts = [[node["add"], node["add_2"]], [node["add_1"], node["mul"]]]
    assert can_be_cut_out(module.graph, parts[:1]) and can_be_cut_out(module.graph, parts[1:])
    assert not can_be_cut_out(module.graph, parts)
    levels = by_levels(module.graph, [[node[n]] for n in ("add", "add_1", "add_2", "mul")])
    assert [[n.name for n in level] for level in levels] == [["add", "add_1"], ["add_2", "mul"]]
    assert can_be_cut_out(module.graph, levels)


def test_nodes_of_a_group_stay_together_on_the_highest_level() -> None:
    module = fx.symbolic_trace(crossing)
    node = calls(module)
    levels = by_levels(module.graph, [[node["add"], node["add_2"]], [node["add_1"]]])
    assert [[n.name for n in level] for level in levels] == [["add_1"], ["add", "add_2"]]


@pytest.mark.parametrize("seed", range(20))
def test_levels_of_random_graphs_can_be_cut_out(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(40):
        two = torch.randint(len(nodes), (2,), generator=generator).tolist()
        nodes.append(graph.call_function(torch.add, tuple(nodes[i] for i in two)))
    graph.output(tuple(nodes))
    taken = [[n] for n in nodes[1:] if torch.rand((), generator=generator) < 0.6]
    levels = by_levels(graph, taken)
    assert can_be_cut_out(graph, levels)
    assert sorted(n.name for level in levels for n in level) == sorted(n.name for [n] in taken)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.first(x), self.second(x)
        # sin and cos are none of XNNPACK's
        return self.left(first + second.sin()), self.right(second * first.cos())


def test_the_runtime_takes_parts_that_read_each_other(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    model = backquant.quantize(Net().eval(), backend="xnnpack", calibration=[x])
    found = backquant.export(model, tmp_path / "m.pte", example_inputs=x)
    assert found.integer_share == 1.0
    for got, wanted in zip(ExecuTorchModel(tmp_path / "m.pte")(x), model(x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0.05)


class Windows(nn.Module):
    """Cuts a video into windows as Swin does, by a view of eight axes, and adds a bias to these."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(4, 4), nn.Parameter(torch.randn(2, 1, 2, 1, 2, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cut = self.layer(x).view(-1, 2, 2, 2, 2, 2, 2, 4) + self.bias
        return cut.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(-1, 8, 4)


def test_more_axes_than_xnnpack_has_stay_outside(tmp_path: Path) -> None:
    """In a delegate they do not load."""
    torch.manual_seed(0)
    x, path = torch.randn(2, 4, 4, 4, 4), tmp_path / "model.pte"
    model = backquant.quantize(Windows().eval(), x, backend="xnnpack", calibration=[x])
    found = backquant.export(model, path, example_inputs=x)
    assert found.integer_share == 1.0
    torch.testing.assert_close(ExecuTorchModel(path)(x), model(x), rtol=0, atol=0.05)
