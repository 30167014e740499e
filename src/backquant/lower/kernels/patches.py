"""Convolutions as products of gathered patches, for shapes that oneDNN computes wrongly.

Every window becomes one pixel that holds all its values as channels, and the kernel a 1×1 convolution over
them: the same sums of the same integers. It takes the memory of all windows, and longer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from backquant.lower.kernels.geometry import Geometry, output_size
from backquant.lower.kernels.packed import WeightTensors
from backquant.lower.kernels.zero_point import pad_with


def gathered(x: torch.Tensor, geometry: Geometry, zero_point: int) -> torch.Tensor:
    """The windows of ``x`` ``[batch, in, ...]``: ``[batch, in * taps, ...]`` of the size of the result.

    ``zero_point``: what padding holds.

    >>> x = torch.arange(6, dtype=torch.uint8).reshape(1, 1, 2, 3)
    >>> gathered(x, Geometry((1, 2), (1, 1), (0, 0), (1, 1)), 0)[0].tolist()
    [[[0, 1], [3, 4]], [[1, 2], [4, 5]]]
    """
    out = output_size(x.shape[2:], geometry)
    if any(geometry.padding):
        x = pad_with(x, geometry.padding, zero_point)
    shape: list[int] = []
    for axis, (n, k) in enumerate(zip(out, geometry.kernel, strict=True)):
        starts = torch.arange(n).mul(geometry.stride[axis]).unsqueeze(1)
        taps = torch.arange(k).mul(geometry.dilation[axis])
        x = x.index_select(axis + 2, (starts + taps).flatten())
        shape += [n, k]
    dims = len(out)
    pixels, taps_first = range(2, 2 + 2 * dims, 2), range(3, 3 + 2 * dims, 2)
    gathered = x.reshape(*x.shape[:2], *shape).permute(0, 1, *taps_first, *pixels)
    return gathered.reshape(x.shape[0], -1, *out)


def as_point(config: Any, tensors: WeightTensors) -> tuple[Any, WeightTensors]:
    """Configuration and weight of the 1×1 convolution over ``gathered`` windows.

    ``config``: a dataclass with ``stride``, ``padding`` and ``dilation``.

    >>> from backquant.lower.kernels.conv import ConvConfig
    >>> config = ConvConfig((2,), (1,), (1,), 1, 0.5, 0, 0.5, 0, torch.uint8)
    >>> weight = torch.ones(4, 3, 5, dtype=torch.int8)
    >>> made, tensors = as_point(config, WeightTensors(weight, torch.ones(1), torch.zeros(1), None))
    >>> made.stride, made.padding, tuple(tensors.weight.shape)
    ((1,), (0,), (4, 15, 1))
    """
    ones = (1,) * len(config.stride)
    weight = tensors.weight.reshape(tensors.weight.shape[0], -1, *ones)
    point = replace(config, stride=ones, padding=(0,) * len(ones), dilation=ones)
    return point, replace(tensors, weight=weight)
