"""Captures that are tried."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backquant.graph import capture
from backquant.pipeline.capture import _agrees


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.ones(2, 4)], 1)


@pytest.mark.parametrize(("rows", "agrees"), [(2, True), (3, False)])
def test_a_graph_that_fails_on_its_inputs_is_tried_in_silence(
    rows: int, agrees: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Doubled()
    assert _agrees(capture(model), model, torch.ones(rows, 4)) is agrees
    assert capsys.readouterr().err == ""
