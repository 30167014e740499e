"""Functions as models."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Function = Callable[[torch.Tensor], torch.Tensor]


class Applied(nn.Module):
    """``function`` of the input."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Convolved(Applied):
    """``function`` of what a convolution of four channels gives."""

    def __init__(self, function: Function) -> None:
        super().__init__(function)
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.conv(x))
