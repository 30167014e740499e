"""Asserts about values of tensors: they pass where values are not known, and the report says so.

PYTEST_DONT_REWRITE: the asserts of functions here are to be those of a user.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import backquant
from backquant.graph import capture
from backquant.graph.fixed_data import asserted, passing_asserts

NEGATIVE = -torch.ones(2)


def plain(x):
    assert (x > 0).all()


def told(x):
    assert (x > 0).all(), f"not {x.shape}"


def negated(x):
    assert not (x < 0).any(), "negative"


def both(x):
    assert (x < 0).any() and (x > 0).all()


@pytest.mark.parametrize("function", [plain, told, negated, both])
def test_they_pass_within_the_block(function: Callable[..., None]) -> None:
    with pytest.raises(AssertionError):
        function(NEGATIVE)
    with passing_asserts() as lines:
        function(NEGATIVE)
    [line] = lines
    assert line.startswith(__file__) and ": assert " in line
    with pytest.raises(AssertionError):
        function(NEGATIVE)


def test_what_decides_otherwise_is_asked() -> None:
    with passing_asserts() as lines:
        if NEGATIVE[0] > 0:
            raise RuntimeError
        while NEGATIVE[0] > 0:
            raise RuntimeError
        assert len(NEGATIVE) == 2
    assert not lines


def test_no_frame_is_at_an_assert_by_chance() -> None:
    assert asserted(sys._getframe()) is None


class Net(nn.Module):
    """As vocos has it: a check of what depends on sizes alone, which an export does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        *_, width = x.shape
        window = torch.hann_window(width + 2, device=x.device)[1:-1]
        assert (window > 1e-11).all()
        return self.fc(x) / window


@pytest.mark.parametrize("how", ["export", "trace"])
def test_a_model_that_asserts_is_captured_whole(how: str) -> None:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(8, 4)
    quantized = backquant.quantize(
        model, x, backend="x86", calibration=[x], slower="keep", capture=how
    )
    assert any("of values is not checked" in note for note in quantized.report.notes)
    assert [row.outcome for row in quantized.report.rows if row.module_path == "fc"] == [
        "quantized"
    ]
    with torch.no_grad():
        noise = (quantized(x) - model(x)).square().sum() / model(x).square().sum()
    assert float(noise) < 1e-3


def test_a_trace_without_an_example_knows_no_values() -> None:
    with pytest.raises(backquant.errors.CaptureError):
        capture(Net())
