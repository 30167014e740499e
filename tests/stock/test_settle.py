"""Random weights are settled: nothing multiplies by zero, batch norms fit their inputs, copies are called."""

from __future__ import annotations

import torch
from benchmarks.stock.settle import call, settle
from torch import nn


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.layer_scale = nn.Parameter(torch.full((4, 1, 1), 1e-6))
        self.head = nn.Linear(4, 2)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.norm.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.layer_scale * self.norm(self.conv(x))).mean((2, 3)))


def test_settle() -> None:
    model = settle(Residual(), lambda batch: 3 + torch.randn(batch, 3, 4, 4))
    assert not any(part.training for part in model.modules())
    assert model.layer_scale.eq(0.5).all()
    assert model.norm.weight.eq(1.0).all()
    assert model.head.weight.abs().sum() > 0
    torch.manual_seed(0)
    with torch.no_grad():
        found = model.norm(model.conv(3 + torch.randn(64, 3, 4, 4)))
    assert found.mean((0, 2, 3)).abs().max() < 0.5
    assert (found.std((0, 2, 3)) - 1).abs().max() < 0.5
    assert model.norm.momentum == nn.BatchNorm2d(1).momentum


def test_values_do_not_vanish_in_an_epsilon() -> None:
    """As in the EfficientNet of transformers, which gave 1e-34."""
    layers = [part for _ in range(4) for part in (nn.Linear(6, 6), nn.BatchNorm1d(6, eps=1e-3))]
    for layer in layers[::2]:
        nn.init.normal_(layer.weight, std=1e-3)
    model = settle(nn.Sequential(*layers), lambda batch: torch.randn(batch, 6))
    assert model(torch.randn(16, 6)).std() > 0.3


def test_call_leaves_its_inputs() -> None:
    inputs = {"x": torch.ones(2)}
    call(lambda x: x.add_(1), inputs)
    assert inputs["x"].eq(1).all()
    assert call(lambda a, b: a - b, (torch.ones(1), torch.ones(1))).eq(0).all()
