from __future__ import annotations

import torch
from torch import fx

from backquant.match.float_policy import MovesBetween


def forward(x: torch.Tensor) -> torch.Tensor:
    made = torch.relu(x)
    first = made.chunk(2)
    second = first.chunk(2)
    beside = made.chunk(x.size(0).chunk(1))
    return torch.tanh(second), torch.exp(first), torch.sin(beside)


def test_both_directions_follow_what_turns_to_float() -> None:
    graph = fx.symbolic_trace(forward).graph
    nodes = {node.name: node for node in graph.nodes}
    moves = MovesBetween(
        graph.nodes,
        is_move=lambda node: node.target == "chunk",
        is_tensor=lambda node: node.name != "size",
        gives_integers=lambda node: node.name == "relu",
        reads_integers=lambda node: node.name in ("tanh", "exp"),
    )
    # chunk_2 moves a size, which is no value; chunk_3 moves a value by it
    assert [name for name in nodes if moves.gives_integers(nodes[name])] == [
        "chunk",
        "chunk_1",
        "chunk_3",
    ]
    assert [name for name in nodes if moves.reads_integers(nodes[name])] == [
        "chunk",
        "chunk_1",
        "tanh",
        "exp",
    ]
    assert [node.name for node in moves.read_floats([nodes["tanh"]])] == ["chunk_1"]
    assert moves.reads_integers(nodes["chunk"])  # exp still reads it
    assert [node.name for node in moves.read_floats([nodes["exp"]])] == ["chunk"]
    assert {node.name for node in moves.give_floats([nodes["relu"]])} == {
        "chunk",
        "chunk_1",
        "chunk_3",
    }
    assert list(moves.give_floats([nodes["relu"]])) == []
    assert not moves.gives_integers(nodes["chunk_1"])
