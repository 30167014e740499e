"""Which additions and products the defaults leave in float."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from backquant.backend_config import LeaveFloat
from backquant.graph import GraphIndex
from backquant.match.float_places import find_float_places

ADD = (operator.add, torch.add)
RESIDUAL = LeaveFloat(ADD, after=(nn.Linear, F.linear), before=(nn.LayerNorm,))
TABLE = LeaveFloat((*ADD, operator.mul), with_table=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout()
        self.conv = nn.Conv1d(4, 4, 1)
        self.gamma = nn.Parameter(torch.ones(4))
        self.register_buffer("mask", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = torch.relu(self.conv(x) + x)  # neither
        b = a + 1  # read by c, which a norm reads
        c = self.drop(self.fc(a).view(-1, 4)) * self.gamma + b
        d = self.norm(c.transpose(0, 1))
        return torch.add(d, self.mask) + d


def _graph(root: Any) -> GraphIndex:
    return GraphIndex(fx.symbolic_trace(root))


def _left(rules: list[LeaveFloat]) -> list[tuple[str, int]]:
    return [tuple(left) for left in find_float_places(_graph(Block()), rules)]


def test_residual_additions() -> None:
    assert _left([RESIDUAL]) == [("add_1", 0), ("add_2", 0)]


def test_tables() -> None:
    # the product with gamma reads a parameter, which is no table
    assert _left([TABLE]) == [("add_3", 0)]
    assert _left([RESIDUAL, TABLE]) == [("add_1", 0), ("add_2", 0), ("add_3", 1)]


def test_inputs_of_indices_are_tables() -> None:
    def f(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions.cos()
        return x * angles + x * angles.sin()

    found = find_float_places(_graph(f), [TABLE], lambda name: name != "positions")
    assert [left.node for left in found] == ["mul", "mul_1", "add"]
    assert find_float_places(_graph(f), [TABLE]) == ()
