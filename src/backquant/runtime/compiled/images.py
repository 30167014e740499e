"""Operators on images of 8-bit integers that compiled code has kernels for (``images.h``): joined and scaled
by channel, times one number a channel, means, two halves in turn, and floats of three planes as integers.

``is_image`` says what the kernels take; elsewhere Inductor generates code. Results are channels last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from backquant.lower.kernels.boundary import quantize
from backquant.native.plan import has_kernels
from backquant.runtime.compiled.inductor import V, ir

_LIBRARY = torch.library.Library("backquant", "FRAGMENT")
_LIBRARY.define("image(Tensor x, float scale, int zero_point) -> Tensor")
_LIBRARY.define("rescaled(Tensor[] parts, Tensor scale, Tensor shift, int low, int high) -> Tensor")
_LIBRARY.define(
    "joined(Tensor[] parts, float[] scales, float[] shifts, int low, int high) -> Tensor"
)
_LIBRARY.define(
    "gated(Tensor x, Tensor y, float[] zeros, float scale, int low, int high) -> Tensor"
)
_LIBRARY.define("averaged(Tensor x) -> Tensor")
_LIBRARY.define("shuffled(Tensor x) -> Tensor")

#: float32 ``[batch, 3, height, width]`` to uint8
image = torch.ops.backquant.image.default
#: the parts along the channels, each channel (the scales are columns) as ``x * scale + shift``
rescaled = torch.ops.backquant.rescaled.default
#: the same with one scale and shift for each part
joined = torch.ops.backquant.joined.default
#: ``(x - zeros[0]) * (y - zeros[1]) * scale + zeros[2]``, ``y`` with one number a channel
gated = torch.ops.backquant.gated.default
#: the mean of each channel, in the integers of ``x``
averaged = torch.ops.backquant.averaged.default
#: the channels of both halves in turn; there is an even number of them
shuffled = torch.ops.backquant.shuffled.default


def is_image(x: torch.Tensor) -> bool:
    """Whether the kernels take it: uint8 ``[batch, channels, height, width]`` of more than one pixel, all but
    the batch of a known size, on a CPU that there are kernels for.
    """
    if not (x.dim() == 4 and x.dtype == torch.uint8 and has_kernels()):
        return False
    _, channels, height, width = x.shape
    return all(isinstance(n, int) for n in (channels, height, width)) and height * width > 1


def is_gate(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether ``y`` has one number for each channel of the image ``x``."""
    same = is_image(x) and y.dtype == torch.uint8 and y.dim() == 4
    return same and y.shape[0] == x.shape[0] and tuple(y.shape[1:]) == (x.shape[1], 1, 1)


def _image(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    return _last(quantize(x, scale, zero_point, 0, 255, torch.uint8))


def _rescaled(
    parts: Sequence[torch.Tensor], scale: torch.Tensor, shift: torch.Tensor, low: int, high: int
) -> torch.Tensor:
    by_channel = (1, -1, 1, 1)
    value = torch.cat(list(parts), 1) * scale.view(by_channel) + shift.view(by_channel)
    return _last(value.round().clamp(low, high).byte())


def _joined(
    parts: Sequence[torch.Tensor],
    scales: Sequence[float],
    shifts: Sequence[float],
    low: int,
    high: int,
) -> torch.Tensor:
    each = zip(parts, scales, shifts, strict=True)
    value = torch.cat([x * scale + shift for x, scale, shift in each], 1)
    return _last(value.round().clamp(low, high).byte())


def _gated(
    x: torch.Tensor, y: torch.Tensor, zeros: Sequence[float], scale: float, low: int, high: int
) -> torch.Tensor:
    value = (x - zeros[0]) * (y - zeros[1]) * scale + zeros[2]
    return _last(value.round().clamp(low, high).byte())


def _averaged(x: torch.Tensor) -> torch.Tensor:
    return x.float().mean((2, 3), keepdim=True).round().byte()


def _shuffled(x: torch.Tensor) -> torch.Tensor:
    return _last(x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))


def _last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _image_shape(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:  # noqa: ARG001
    return torch.empty_like(x, dtype=torch.uint8, memory_format=torch.channels_last)


def _joined_shape(parts: Sequence[torch.Tensor], *_: object) -> torch.Tensor:
    n, _c, h, w = parts[0].shape
    return _last(parts[0].new_empty((n, sum(x.shape[1] for x in parts), h, w)))


def _same_shape(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.channels_last)


def _averaged_shape(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((x.shape[0], x.shape[1], 1, 1))


for _name, _run, _shape in (
    ("image", _image, _image_shape),
    ("rescaled", _rescaled, _joined_shape),
    ("joined", _joined, _joined_shape),
    ("gated", _gated, _same_shape),
    ("averaged", _averaged, _averaged_shape),
    ("shuffled", _shuffled, _same_shape),
):
    _LIBRARY.impl(_name, _run, "CPU")
    torch.library.register_fake(f"backquant::{_name}", _shape, lib=_LIBRARY)


# How the tensors of Inductor's graph lie in memory, for kernels that read them in one order only.

CHANNELS_LAST = (0, 2, 3, 1)


def value_of(item: Any) -> torch.Tensor:
    """A constant of the graph."""
    item.realize()
    found: torch.Tensor = V.graph.constants[item.get_name()]
    return found


def _is_plain(size: Sequence[Any], stride: Sequence[Any], order: Sequence[int]) -> bool:
    """Whether elements lie without holes, the dimensions in the given order (the innermost last)."""
    step: Any = 1
    for dim in reversed(order):
        if size[dim] != 1 and stride[dim] != step:
            return False
        step = step * size[dim]
    return True


def laid_out(x: Any, order: Sequence[int]) -> Any:
    """``x`` in memory without holes or offset, in the given order of dimensions."""
    places = [0] * len(order)
    for place, dim in enumerate(reversed(order)):
        places[dim] = place
    x = ir.ExternKernel.require_stride_order(ir.ExternKernel.realize_input(x), places)
    layout = x.get_layout()
    if layout.offset == 0 and _is_plain(x.get_size(), x.get_stride(), order):
        return x
    return ir.ExternKernel.require_stride_order(ir.ExternKernel.copy_input(x), places)


def is_known(*sizes: Any) -> bool:
    """Whether sizes are numbers, not names of any size."""
    return all(isinstance(size, int) or size.is_number for size in sizes)


def hint(size: Any) -> int:
    """The size in the example."""
    return int(V.graph.sizevars.optimization_hint(size))
