"""Dynamic sizes that a model fixes, and sizes by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import CaptureError


class Tagger(nn.Module):
    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True) if recurrent else None
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.lstm is None else self.lstm(x)[0]
        return self.fc(x) if self.lstm is not None else self.fc(x).reshape(-1, 28)


X = torch.randn(2, 7, 4)


def test_a_size_that_the_model_fixes() -> None:
    shapes = {"x": {1: "length"}}
    with pytest.raises(
        CaptureError, match="the model fixes the dynamic size 'length' to 7"
    ) as raised:
        backquant.quantize(Tagger(False), X, calibration=[X], dynamic_shapes=shapes)
    assert "dynamic_shapes=None" in str(raised.value)


@pytest.mark.parametrize(
    "options", [{"capture": "trace"}, {"dynamic_shapes": {"x": {1: "length"}}}]
)
def test_the_length_of_recurrent_layers_is_free(options: dict[str, Any]) -> None:
    quantized = backquant.quantize(Tagger(True), X, calibration=[X], **options)
    assert quantized(torch.randn(2, 9, 4)).shape == (2, 9, 4)


def test_names_are_sizes() -> None:
    shapes = {"x": {0: "batch<=8"}}
    quantized = backquant.quantize(Tagger(False), X, calibration=[X], dynamic_shapes=shapes)
    assert quantized(torch.randn(5, 7, 4)).shape == (5, 28)
