"""A model that is mostly a table of embeddings hardly shrinks while that is float: the report says so."""

from __future__ import annotations

import torch
from torch import nn

import backquant


class Words(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(rows, 32), nn.Linear(32, 32)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(words))


def notes(rows: int, mapping: backquant.QConfigMapping | None = None) -> list[str]:
    model, words = Words(rows).eval(), torch.randint(0, rows, (4, 8))
    made = backquant.quantize(
        model, calibration=[words], qconfig_mapping=mapping, slower="keep", backend="x86"
    )
    return [note for note in made.report.notes if note.startswith("embeddings")]


def test_a_large_table() -> None:
    [note] = notes(5000)
    assert "embeddings in float are 100% of the size" in note


def test_a_small_one_is_not_worth_a_word() -> None:
    assert not notes(2)


def test_the_fix_that_is_given() -> None:
    model, words = Words(5000).eval(), torch.randint(0, 5000, (4, 8))
    before = backquant.quantize(model, calibration=[words], slower="keep", backend="x86").report
    [row] = (row for row in before.rows if row.operator == "Embedding")
    fix = next(reason.fix for reason in row.reasons if reason.fix)
    scope = {**vars(torch), **vars(backquant.qconfig), **vars(backquant.observe), "torch": torch}
    scope["qconfig_mapping"] = mapping = backquant.default_mapping("x86")
    exec(fix, scope)
    assert not notes(5000, mapping)
