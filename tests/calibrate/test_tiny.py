from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1e-8, "'input_1' and 2 more"), (0.0, None), (1.0, None)],
)
def test_the_report_names_what_becomes_zero(size: float, expected: str | None) -> None:
    model = nn.Sequential(
        nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False)
    ).eval()
    data = [torch.full((2, 4), size)]
    found = backquant.quantize(model, data[0], backend="qnnpack", calibration=data, slower="keep")
    notes = [note for note in found.report.notes if "become zero" in note]
    if expected is None:
        assert notes == []
    else:
        assert notes[0].startswith(expected) and "1.19e-07" in notes[0]
    loaded = found.report.to_dict()["notes"]
    assert [note for note in loaded if "become zero" in note] == notes
