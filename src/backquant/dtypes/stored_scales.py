"""Scales of groups and blocks in the dtypes that hardware stores them in.

1. E8M0 by OCP's rule, ``2**(floor(log2(largest)) - exponent of the dtype's largest)``, so that the largest
   values of a block may saturate (MX specification 1.0, section 6.3).
2. E4M3 rounded to nearest, in units of the one scale with which the largest block takes E4M3's largest
   value (NVFP4).
3. Float16 and bfloat16 rounded to nearest (GGUF, checkpoints of language models); the zero point that
   belongs to a scale stays.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LEAST = 2.0**-9  # the smallest that E4M3 has: no scale is 0
_NARROW = (torch.float16, torch.bfloat16)


def unit_of(scale: Tensor) -> Tensor:
    """Rule 2: the one scale, float32, with which the largest of ``scale`` is E4M3's largest value.

    >>> unit_of(torch.tensor([1.0, 448.0]))
    tensor(1.)
    """
    return (scale.max() / torch.finfo(torch.float8_e4m3fn).max).float()


def stored_scale(
    scale: Tensor, scale_dtype: torch.dtype | None, high: float, unit: Tensor | None = None
) -> Tensor:
    """``scale`` (float64, any shape) rounded to ``scale_dtype``; ``high``: the largest value of an element.
    ``unit``: of rule 2, where other tensors share it.

    >>> stored_scale(torch.tensor([0.3, 1.0]).double(), torch.float8_e8m0fnu, 448).tolist()
    [0.5, 1.0]
    """
    if scale_dtype is torch.float8_e8m0fnu:
        largest = torch.floor(torch.log2(scale * high)) - math.floor(math.log2(high))
        return torch.exp2(largest.clamp(-127, 127))
    if scale_dtype is torch.float8_e4m3fn:
        unit = (unit_of(scale) if unit is None else unit).double()
        parts = (scale / unit).float().to(torch.float8_e4m3fn).double()
        return parts.clamp(min=_LEAST) * unit
    if scale_dtype in _NARROW:
        least = torch.finfo(scale_dtype).smallest_normal
        most = torch.finfo(scale_dtype).max
        return scale.clamp(least, most).to(scale_dtype).double()
    return scale
