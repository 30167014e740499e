"""Dropout that a model means in evaluation mode, too, and that of a program exported too early."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backquant
from backquant.errors import CaptureError


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:  # not for a symbolic trace
        return self.last(F.dropout(F.relu(self.first(sum(parts))), 0.5, training=True))


def test_a_model_that_always_drops_draws_at_each_call() -> None:
    torch.manual_seed(0)
    model, x = Dropping().eval(), (torch.randn(16, 64),)
    quantized = backquant.quantize(model, x, backend="x86", calibration=[x] * 3, slower="keep")
    assert quantized.report.coverage == 1.0
    assert any("draws random numbers at each call" in note for note in quantized.report.notes)
    assert not torch.equal(quantized(*x), quantized(*x))
    found, wanted = [], []
    for seed in range(16):
        torch.manual_seed(seed)
        found.append(quantized(*x))
        torch.manual_seed(seed)
        wanted.append(model(*x).detach())
    noise = (torch.stack(found) - torch.stack(wanted)).square().sum()
    assert noise / torch.stack(wanted).square().sum() < 1e-2


def test_a_program_exported_in_training_mode_is_refused() -> None:
    x = (torch.randn(2, 4),)
    program = torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.Dropout()).train(), x)
    with pytest.raises(CaptureError, match="exported in training mode: dropout is active"):
        backquant.quantize(program, x, backend="x86", calibration=[x])
