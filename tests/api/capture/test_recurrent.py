"""Recurrent layers stay modules in an exported graph, so that they are quantized dynamically."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant


class Tagger(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.rnn = kind(8, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y, state = self.rnn(self.embed(ids))
        hidden = state[0] if isinstance(self.rnn, nn.LSTM) else state
        return self.head(y) + hidden[-1].mean()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_as_a_trace(kind: type[nn.RNNBase]) -> None:
    model = Tagger(kind).eval()
    ids = torch.randint(0, 20, (2, 7))
    mapping = backquant.QConfigMapping().set_global(backquant.default_dynamic_qconfig)
    made = [
        backquant.quantize(model, ids, qconfig_mapping=mapping, backend="fbgemm", capture=how)
        for how in ("trace", "export")
    ]
    outcomes = [
        {
            row.name: row.outcome
            for row in q.report.rows
            if row.operator in (kind.__name__, "Linear")
        }
        for q in made
    ]
    assert outcomes[0] == outcomes[1] == {"rnn": "quantized", "head": "quantized"}
    assert torch.equal(made[0](ids), made[1](ids))
    # export fixes the length of the sequences of recurrent layers
    assert made[1](torch.randint(0, 20, (3, 7))).shape == (3, 7, 3)
