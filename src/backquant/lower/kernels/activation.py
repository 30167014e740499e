"""Activation functions on plain integer tensors."""

from __future__ import annotations

import torch


def clamp(x: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """Integers clamped to ``[low, high]``; a new tensor.

    >>> clamp(torch.tensor([3, 90, 200], dtype=torch.uint8), 10, 100)
    tensor([ 10,  90, 100], dtype=torch.uint8)
    """
    return torch.clamp(x, low, high)
