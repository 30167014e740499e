"""Which sizes an export leaves free, and what it leaves behind."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backquant
from backquant.errors import CaptureError
from backquant.graph.export.numbers import plain_comparisons
from backquant.graph.export.program import export_model


class Causal(nn.Module):
    """As openai-whisper's attention: whether it is causal depends on a size."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        return F.scaled_dot_product_attention(x, x, x, is_causal=x.shape[1] > 1)


def test_a_comparison_of_sizes_is_a_plain_truth_where_a_function_wants_one() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Causal(), nn.Linear(8, 8)).eval(), torch.randn(2, 5, 8)
    batches = [torch.randn(16, 9, 8)]
    result = backquant.quantize(model, x, calibration=batches, capture="export", slower="keep")
    assert not any("stays float as a whole" in note for note in result.report.notes)
    longer = batches[0][:3]
    error = (result(longer) - model(longer)).norm() / model(longer).norm()
    assert error < 0.05


def test_comparisons_are_put_back() -> None:
    before = torch.SymInt.__gt__
    with plain_comparisons():
        assert torch.SymInt.__gt__ is not before
    assert torch.SymInt.__gt__ is before


class OneSize(nn.Module):
    """Can be exported for one size only, and fails while it is traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x.shape[0], int):
            raise TypeError("a size that is a number")
        return x + 1


class AroundOneSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.fc = OneSize(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.part(x))


def test_where_free_sizes_fail_the_sizes_are_those_of_the_example() -> None:
    found = export_model(OneSize(), (torch.ones(2, 4),), {})
    assert any("sizes are those of the example inputs" in note for note in found.notes)


def test_a_part_in_which_free_sizes_fail_stays_whole() -> None:
    found = export_model(AroundOneSize().eval(), (torch.ones(2, 4),), {})
    assert set(found.opaque) == {"part"}
    assert not found.notes


def test_inputs_keep_their_attributes_when_an_export_fails() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise TypeError("no")

    x = torch.ones(2, 4)
    x.mine = 3  # type: ignore[attr-defined]
    with pytest.raises(CaptureError, match="no"):
        export_model(Fails(), (x,), {})
    assert x.__dict__ == {"mine": 3}
