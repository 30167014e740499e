"""Packed sequences: ``pack_padded_sequence`` and ``pad_packed_sequence`` are calls of the graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import backquant
from backquant.graph import capture
from backquant.qconfig import QConfigMapping, default_dynamic_qconfig


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        output, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(output)


def _inputs(batch: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 6, 8), torch.tensor([6, 2, 4])[:batch]


def test_a_tagger(sqnr: Callable[[torch.Tensor, torch.Tensor], float], tmp_path: Path) -> None:
    model = Tagger().eval()
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    quantized = backquant.quantize(model, _inputs(), backend="fbgemm", qconfig_mapping=mapping)
    assert quantized.report.coverage == 1.0 and len(quantized.kernels) == 2
    inputs = _inputs(2)
    with torch.no_grad():
        assert sqnr(model(*inputs), quantized(*inputs)) > 30
    backquant.save(quantized, tmp_path / "model.bq")
    assert torch.equal(backquant.load(tmp_path / "model.bq")(*inputs), quantized(*inputs))


def test_the_trace_leaves_nothing_behind() -> None:
    function = nn.utils.rnn.pack_padded_sequence
    first = capture(Tagger().eval()).module
    first.recompile()
    assert nn.utils.rnn.pack_padded_sequence is function is pack_padded_sequence
    assert capture(nn.Sequential(nn.ReLU())).module is not None
