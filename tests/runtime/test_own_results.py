"""What a caller writes into a result changes no later one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

import backquant
from backquant.runtime.boundary import returned_tensors
from backquant.runtime.replay.program import Program
from backquant.runtime.replay.record import Recording, record


class Stateful(nn.Module):
    """Returns states and tables that depend on no input, and views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        state = torch.zeros((2, 3))
        return {
            "logits": self.fc(x),
            "state": state,
            "parts": [state[:, 0], self.table, self.table[:2], self.table * 2],
            "tables": (torch.arange(3), torch.ones(3).expand(2, 3).contiguous()),
            "input": x,
        }


def tensors(result: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in tree_leaves(result)
        if not torch.equal(leaf, X)  # passed through: the caller's own
    ]


X = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.mark.parametrize("capture", ["trace", "export"])
@pytest.mark.parametrize("backend", ["x86", "fbgemm", "tensorrt"])  # the last has no engine
def test_a_result_that_is_written_to_changes_no_later_one(
    capture: Any, backend: str, tmp_path: Path
) -> None:
    model = Stateful().eval()
    made: Any = backquant.quantize(model, X, backend=backend, calibration=[X], capture=capture)
    backquant.save(made, tmp_path / "model.bq")
    for each in (made, backquant.load(tmp_path / "model.bq")):
        wanted = [value.clone() for value in tensors(each(X))]
        for _ in range(5):  # looked at, recorded, replayed
            found = tensors(each(X))
            assert all(map(torch.equal, found, wanted))
            for value in found:
                value.add_(1)
        assert torch.equal(each.table, torch.arange(4.0))
        if backend != "tensorrt":
            assert each.replays.programs == 1, each.replays.refused


def test_what_depends_on_no_input_is_made_for_each_call() -> None:
    """The interpreter of a recording computes it once."""

    def single(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(2, 3)[0]

    def several(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state = torch.zeros(2)
        return x + 1, state, state.view(1, 2)

    for function in (single, several):
        _, recording = record(function, (X,), {}, list)
        assert isinstance(recording, Recording)
        program = Program(recording)
        for _ in range(3):
            for found in tree_leaves(program([X]))[-2:]:
                assert not found.any()
                found.add_(1)


def test_what_is_computed_shares_no_memory_with_the_model() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    viewed = graph.call_method("expand", (graph.get_attr("a"), 3, 2))
    changed = graph.call_function(torch.relu_, (graph.get_attr("b"),))
    computed = graph.call_function(torch.add, (x, graph.get_attr("c")))
    flat = graph.call_module("flatten", (graph.get_attr("d"),))
    graph.output((computed, [viewed, changed], {"e": graph.call_method("t", (flat,))}))
    root = nn.Module()
    root.flatten = nn.Flatten()
    for name in "abcd":
        root.register_buffer(name, torch.ones(2))
    assert set(returned_tensors(fx.GraphModule(root, graph))) == {"a", "b", "d"}
