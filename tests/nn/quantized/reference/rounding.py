"""Integers beside those of torch's quantize operators."""

from __future__ import annotations

import torch

#: torch's CUDA builds round before they add the zero point: halves, and what float32 cannot tell, are a step
#: apart.
_HALF = torch.quantize_per_tensor(torch.full((64,), 0.5), 1.0, 1, torch.qint8).int_repr()
ROUNDS_AFTER_ADDING = bool((_HALF == 2).all())


def same_integers(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether they are equal, but for that step."""
    if ROUNDS_AFTER_ADDING:
        return torch.equal(ours, theirs)
    steps = (ours.long() - theirs.long()).abs()
    return ours.dtype == theirs.dtype and bool((steps <= 1).all())
