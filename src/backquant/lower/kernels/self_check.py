"""oneDNN's integer kernels, checked before their first use.

On some CPUs (with AMX, and AMD's with VNNI) oneDNN (torch 2.13) computes some convolutions wrongly, by
more than their largest value: kernels of 4 over 32 channels with stride 4, of 8 over 16 with stride 8, 16×16
over 8 channels, with a zero point groups of one channel in and more than 32 out, and others whose rule is not
known (``docs/kernels.md``). So each shape is tried once, on random integers of as many bits as its layers
get here (7 where two products are summed in 16 bits); what differs runs as a product
of gathered patches (``onednn_conv.gathered``). So does what cannot be tried: oneDNN never ends.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from backquant.lower.kernels.geometry import Geometry
from backquant.lower.kernels.prepared import channels_last
from backquant.lower.kernels.zero_point import fold_zero_point
from backquant.lower.machine import machine_facts

_KEPT = 4096  # shapes whose result is remembered; the least recently used are checked again
_LANES = 16  # of a vector of 512 bits: 32-bit sums
_LONG = 14  # taps
_TOLERANCE = 1e-3  # relative to the largest sum; float32 sums of 8-bit products are exact to 1e-6


def is_right_here(
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    geometry: Geometry,
    groups: int,
    zero_point: int = 0,
) -> bool:
    """Whether this CPU's oneDNN convolves uint8 inputs of ``shape`` ``[batch, in, ...]`` with int8 weights of
    shape ``weight`` ``[out, in / groups, ...]`` rightly. ``zero_point``: the one that the kernel is given;
    any but 0 stands for all others.

    >>> geometry = Geometry((3, 3), (1, 1), (0, 0), (1, 1))
    >>> is_right_here((1, 3, 8, 8), (4, 3, 3, 3), geometry, 1)
    True
    """
    if zero_point and _never_ends(weight, groups):
        return False
    return _is_right(shape, weight, geometry, groups, 100 if zero_point else 0)


def _never_ends(weight: tuple[int, ...], groups: int) -> bool:
    """Whether oneDNN does not stop writing the code of a depthwise convolution with a zero point: with VNNI,
    16 channels, windows of 14 taps and more along a line (stride 1, from 28 results on)."""
    return groups == weight[0] == _LANES and weight[-1] >= _LONG


@lru_cache(maxsize=_KEPT)
def _is_right(*case: Any) -> bool:
    # not to be seen by recordings or by counters of operators
    with torch.no_grad(), _disable_current_modes():
        return _tried(*case)


@lru_cache(maxsize=1)
def folds_zero_exactly() -> bool:
    """Whether a linear layer of this CPU's oneDNN gives exactly 0 where the input is 0 and the bias makes up
    for its zero point: not where it adds the bias to a product that was not rounded.

    >>> folds_zero_exactly() in (True, False)
    True
    """
    generator = torch.Generator().manual_seed(0)
    size, zero_point, x_scale = 64, 116, 0.0297
    weight = torch.randint(-127, 128, (size, size), dtype=torch.int8, generator=generator)
    scale = torch.rand(size, generator=generator) * 1e-3
    result: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")
    bias = fold_zero_point(weight, scale, None, x_scale, zero_point)
    with torch.no_grad(), _disable_current_modes():
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        for rows in (1, size):
            x = torch.full((rows, size), zero_point, dtype=torch.uint8)
            found = torch.ops.onednn.qlinear_pointwise.default(
                x, x_scale, 0, packed, scale, torch.zeros(size).long(), bias, *result
            )
            if bool(found.any()):
                return False
    return True


def _tried(
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    geometry: Geometry,
    groups: int,
    zero_point: int = 0,
) -> bool:
    generator = torch.Generator().manual_seed(0)
    facts = machine_facts()
    narrow = (
        facts.is_x86 and not facts.has_vnni
    )  # layers that would saturate stay float (SATURATION)
    most = 128 if narrow else 256
    x = torch.randint(0, most, shape, dtype=torch.uint8, generator=generator)
    w = torch.randint(-127, 128, weight, dtype=torch.int8, generator=generator)
    steps = (list(geometry.stride), list(geometry.padding), list(geometry.dilation), groups)
    scale, zeros = torch.ones(weight[0]), torch.zeros(weight[0], dtype=torch.int64)
    packed = torch.ops.onednn.qconv_prepack(w, scale, 1.0, zero_point, *steps, [1, *shape[1:]])
    result: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")
    found = torch.ops.onednn.qconv_pointwise.default(
        channels_last(x), 1.0, zero_point, packed, scale, zeros, None, *steps, *result
    )
    convolution = (F.conv1d, F.conv2d, F.conv3d)[len(geometry.stride) - 1]
    expected = convolution(x.float() - zero_point, w.float(), None, *steps)
    return bool((found - expected).abs().max() <= _TOLERANCE * expected.abs().max())
