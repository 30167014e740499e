"""Integers beside those of torch's quantize operators."""

from __future__ import annotations

import torch

#: From 2.14 on torch rounds before it adds the zero point: halves, and what float32 cannot tell, by one step.
ROUNDS_AFTER_ADDING = torch.__version__ < (2, 14)  # a TorchVersion: not compared as text


def same_integers(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether they are equal, but for that step."""
    if ROUNDS_AFTER_ADDING:
        return torch.equal(ours, theirs)
    steps = (ours.long() - theirs.long()).abs()
    return ours.dtype == theirs.dtype and bool((steps <= 1).all())
