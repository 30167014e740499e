"""The experts of a mixture, as models of transformers call them."""

from __future__ import annotations

import torch
from torch import nn


class Experts(nn.Module):
    """Rows [n, 8], sorted by expert, of which ``ends`` has the last of each of three: [n, 12]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.Parameter(torch.randn(3, 8, 12))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return nn.functional.grouped_mm(x, self.weights, offs=ends)
