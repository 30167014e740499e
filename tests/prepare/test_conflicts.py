from __future__ import annotations

import torch
from torch import nn

import backquant


def test_an_operator_that_takes_the_dtype_of_its_input_agrees_with_any_that_is_admitted() -> None:
    """``reshape`` in the default mapping names quint8 only because an observer has to name a dtype."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).reshape(-1, 4))

    quantized = backquant.quantize(Model(), calibration=[torch.randn(4, 8)], backend="executorch")
    assert len(quantized.report.quantized) == 3
