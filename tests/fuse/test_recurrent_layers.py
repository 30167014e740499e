"""``backquant.fuse.taken_apart``: bit for bit what the whole module gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from backquant.fuse import can_separate_layers, separate_recurrent_layers
from backquant.graph import capture


class _Net(nn.Module):
    def __init__(self, rnn: nn.Module) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: torch.Tensor) -> Any:
        y, state = self.rnn(x)
        return (y, state[0], state[1]) if isinstance(self.rnn, nn.LSTM) else (y, state)


class _WithState(_Net):
    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
        if isinstance(self.rnn, nn.LSTM):
            y, (h, c) = self.rnn(x, (h, c))
            return y, h, c
        return self.rnn(x, h)[0]


class _Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(3, 4, num_layers=2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.rnn(x)[1]


MODULES = {
    "lstm": nn.LSTM(3, 4, num_layers=3),
    "batch first": nn.LSTM(3, 4, num_layers=2, batch_first=True),
    "both ways": nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "projected": nn.LSTM(3, 4, num_layers=2, proj_size=2, bidirectional=True),
    "no bias, dropout": nn.LSTM(3, 4, num_layers=2, bias=False, dropout=0.5),
    "gru": nn.GRU(3, 4, num_layers=2, bidirectional=True),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", MODULES)
def test_gives_what_the_module_gives(name: str) -> None:
    model, x = _Net(MODULES[name]).eval(), torch.randn(5, 2, 3)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    captured = capture(model)
    separate_recurrent_layers(captured, ["rnn"])
    assert all(map(torch.equal, captured.module(x), model(x)))
    called = [str(n.target) for n in captured.module.graph.nodes if n.op == "call_module"]
    assert called == [f"rnn_layer_{i}" for i in range(MODULES[name].num_layers)]
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["lstm", "both ways", "gru"])
def test_begins_with_the_state_that_is_given(name: str) -> None:
    rnn: Any = MODULES[name]
    model = _WithState(rnn).eval()
    rows = rnn.num_layers * (2 if rnn.bidirectional else 1)
    inputs = torch.randn(5, 2, 3), torch.randn(rows, 2, 4), torch.randn(rows, 2, 4)
    captured = capture(model)
    separate_recurrent_layers(captured, ["rnn"])
    wanted, found = model(*inputs), captured.module(*inputs)
    assert all(map(torch.equal, tree_leaves(found), tree_leaves(wanted)))


def test_a_state_that_is_returned_as_it_is() -> None:
    [node] = [n for n in capture(_Whole().eval()).module.graph.nodes if n.op == "call_module"]
    assert not can_separate_layers(node, lstm=True)
