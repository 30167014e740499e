"""Models that ask a tensor for its length have a free batch."""

from __future__ import annotations

import sys

import torch
from torch import nn

import backquant
from backquant.graph.export.numbers import lengths_as_sizes


class Heads(nn.Module):
    """As in rtdl's FTTransformer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.fc(x)] * len([1, 2])
        heads = torch.stack(parts).sum(0).reshape(len(x), -1, 2, 4).transpose(1, 2)
        return self.head(heads.reshape(len(x), -1, 8))


def test_the_batch_stays_free() -> None:
    torch.manual_seed(0)
    model = Heads().eval()
    quantized = backquant.quantize(
        model, backend="x86", calibration=[torch.rand(4, 6, 8)] * 2, slower="keep"
    )
    assert "captured by torch.export" in quantized.report.notes[0]
    for batch in (1, 3, 9):
        x = torch.rand(batch, 6, 8)
        assert torch.allclose(quantized(x), model(x), atol=0.1)


class Chosen(nn.Module):
    """What takes plain integers only: the batch is that of the examples, and all of it is quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc(x) * {4: 2.0}.get(len(x), float(f"{len(x)}")))


def test_what_takes_plain_integers_has_them() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Chosen(), nn.Linear(2, 2)).eval(), torch.rand(4, 8)
    options = {"backend": "x86", "calibration": [x] * 2, "slower": "keep", "capture": "export"}
    quantized = backquant.quantize(model, **options)
    assert quantized.report.coverage == 1
    assert torch.allclose(quantized(x), model(x), atol=0.1)


def test_len_is_pythons_again() -> None:
    names = vars(sys.modules[__name__])
    with lengths_as_sizes(nn.Sequential(Heads())):
        assert names["len"](torch.zeros(3, 2)) == 3 and names["len"]([1]) == 1
    assert "len" not in names


def test_a_len_of_the_file_stays() -> None:
    names = vars(sys.modules[__name__])
    names["len"] = own = lambda value: 7
    try:
        with lengths_as_sizes(Heads()):
            assert names["len"] is own
        assert names["len"] is own
    finally:
        del names["len"]
