"""How far a result is from the integer reference, in steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Distance:
    """``worst`` in steps; ``different``: results that are off; ``what``: why they cannot be compared."""

    worst: float
    different: int
    elements: int
    what: str = ""


#: A float result is measured in such parts of its range.
_PARTS = 255


def distance(
    found: Tensor, wanted: Tensor, unit: float | None = None, spread: float = 0.0
) -> Distance:
    """Integers are compared as they are, floats in steps of ``unit``, or in 255ths of their range: that of
    ``wanted``, or ``spread`` where results have more than these few.

    >>> distance(torch.tensor([1, 5]), torch.tensor([1, 3]))
    Distance(worst=2.0, different=1, elements=2, what='')
    >>> distance(torch.zeros(2), torch.zeros(3)).what
    'shape [2] and not [3]'
    >>> distance(torch.tensor([1.0, torch.nan]), torch.tensor([torch.nan, 1.0])).what
    'results that are not finite, at other places'
    """
    if found.shape != wanted.shape:
        return Distance(0, 0, 0, f"shape {list(found.shape)} and not {list(wanted.shape)}")
    if found.dtype != wanted.dtype:
        return Distance(0, 0, 0, f"{found.dtype} and not {wanted.dtype}")
    if not wanted.numel():
        return Distance(0, 0, 0)
    finite = torch.isfinite(wanted)
    if not torch.equal(torch.isfinite(found), finite):
        return Distance(0, 0, 0, "results that are not finite, at other places")
    off = torch.where(finite, found.double() - wanted.double(), 0.0).abs()
    if found.dtype.is_floating_point:
        wanted = torch.where(finite, wanted, 0.0)
        if unit is not None:
            off = (off / unit).round(decimals=2)  # the grid, in float32
        else:
            own = (wanted.max() - wanted.min()).abs().double()
            widest = torch.maximum(own, wanted.abs().max().double()).clamp_min(spread)
            off = off / (widest.clamp_min(1e-12) / _PARTS)
        return Distance(float(off.max()), int((off > 1e-3).sum()), off.numel())
    return Distance(float(off.max()), int((off > 0).sum()), off.numel())
