"""The plan of one layer: what ``library.cpp`` has to know to compute it, as one tensor of bytes.

First the numbers of ``Plan`` in ``library.cpp``, field by field, then the packed weight, the scales and the
shifts. One plan serves every batch size and image size.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from backquant.native.instructions import AMX, AVX512_VNNI, capabilities_here
from backquant.native.packing import (
    AVX512_LAYOUT,
    TAPS,
    Blocks,
    Layout,
    by_channel,
    by_lane,
    choose_blocks,
    choose_tiles,
    pack,
    pack_depthwise,
    pack_spans,
    reads_rows,
    row_sums,
    spans,
    tap_step,
)

# How the 32-bit sums of a kernel become its results: scale, shift, activation, bounds.

_LIMIT = 3.0e38
_SHORT_GELU = 64 * 1.2e-5  # its error is a 64th of a step then
_ACTIVATIONS = {
    ("swish", ""): "SWISH",
    ("hardswish", ""): "HARDSWISH",
    ("gelu", "none"): "GELU",
    ("gelu", "tanh"): "GELU_TANH",
    ("tanh", ""): "TANH",
    ("leaky_relu", ""): "LEAKY",
}


class Weights(Protocol):
    """int8 ``weight`` ``[out, ...]``, float32 ``scale`` ``[out]``; ``folded``: the bias that makes up for the
    zero point of the input."""

    @property
    def weight(self) -> torch.Tensor: ...
    @property
    def scale(self) -> torch.Tensor: ...
    def folded(self, x_scale: float, zero_point: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class Result:
    """The dtype, qparams and activation of what a convolution or linear layer returns: the last arguments of
    its operator.
    """

    scale: float
    zero_point: int
    dtype: torch.dtype
    post_op: str
    numbers: Any
    algorithm: str

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (
            *(self.scale, self.zero_point, self.dtype),
            *(self.post_op, list(self.numbers), self.algorithm),
        )

    @property
    def is_known(self) -> bool:
        """Whether our kernels can compute such a result, on some CPU."""
        known = self.post_op in ("none", "relu", "hardtanh") or self.activation is not None
        return known and self.dtype in (torch.uint8, torch.float32)

    @property
    def has_kernel(self) -> bool:
        """Whether our kernels can compute such a result on this CPU."""
        return self.is_known and has_kernels()

    @property
    def activation(self) -> str | None:
        found = _ACTIVATIONS.get((self.post_op, self.algorithm))
        short = found == "GELU" and self.dtype == torch.uint8 and self.scale >= _SHORT_GELU
        return "GELU_BYTES" if short else found

    def as_floats(self) -> Result:
        """The value before its post-op."""
        return Result(1.0, 0, torch.float32, "none", [], "")

    @property
    def range(self) -> tuple[float, float]:
        """Bounds of the integers, or of the floats."""
        return (0.0, 255.0) if self.dtype == torch.uint8 else (-_LIMIT, _LIMIT)

    @property
    def bounds(self) -> tuple[float, float]:
        """The bounds of the result, with those of a clamping post-op."""
        low, high = self.range
        if self.post_op == "relu":
            return max(low, float(self.zero_point)), high
        if self.post_op == "hardtanh":
            first, last = (bound / self.scale + self.zero_point for bound in self.numbers)
            return min(max(first, low), high), max(min(last, high), low)
        return low, high


def has_kernels() -> bool:
    """Whether this CPU has AVX-512 VNNI, for which ``compile()`` writes its kernels."""
    return AVX512_VNNI.is_on(torch.cpu.get_capabilities())


def has_tiles() -> bool:
    """Whether this CPU has AMX, and the system lets this process use it: ``tiles.h``."""
    return AMX.is_on(capabilities_here())


@dataclass(frozen=True)
class Epilogue:
    """``scale`` and ``shift`` by channel, in the kernel's order."""

    result: Result
    scale: torch.Tensor
    shift: torch.Tensor
    other: tuple[float, int] | None = None

    @property
    def activation(self) -> str:
        """The activation of the kernel; ``NONE`` where the result is bounded by its dtype alone."""
        found = self.result.activation
        return found or ("NONE" if self.result.bounds == self.result.range else "CLAMP")

    @property
    def clamps(self) -> bool:
        return self.result.activation is None

    @property
    def unit(self) -> float:
        """The unit of the scaled sums: steps of the result, or real values where an activation function
        follows.
        """
        return self.result.scale if self.clamps else 1.0

    def adding(self, scale: float, zero_point: int) -> Epilogue:
        """The epilogue with a tensor of these qparams added."""
        shift = self.shift - zero_point * (scale / self.unit)
        return replace(self, shift=shift, other=(scale / self.unit, zero_point))

    @property
    def numbers(self) -> tuple[float, ...]:
        """Those of ``Epilogue`` in ``kernels.h``, from ``other_scale`` on."""
        result = self.result
        low, high = result.bounds if self.clamps else result.range
        return (
            0.0 if self.other is None else self.other[0],
            *(low, high),
            *((1.0, 0.0) if self.clamps else (1.0 / result.scale, float(result.zero_point))),
            float(next(iter(result.numbers), 0.0)) if result.post_op == "leaky_relu" else 0.0,
        )

    @property
    def code(self) -> str:
        other = "nullptr" if self.other is None else "other"
        literals = ", ".join(f"{number!r}f" for number in self.numbers)
        return f"const backquant::Epilogue e{{scale, shift, {other}, {literals}}};"


def epilogue(
    result: Result,
    weights: Weights,
    x_scale: float,
    zero_point: int,
    order: Callable[[torch.Tensor], torch.Tensor],
) -> Epilogue:
    """The epilogue of an operator on an input with these qparams."""
    made = Epilogue(result, weights.scale, weights.scale)
    scale = weights.scale.double() * (x_scale / made.unit)
    shift = weights.folded(x_scale, zero_point).double() / made.unit
    if made.clamps:
        shift = shift + result.zero_point
    return replace(made, scale=order(scale.float()), shift=order(shift.float()))


_MAGIC = 0x32306B71626C6E00
_HEAD, _ALIGNED = 256, 64
_LARGE = 2**12  # 1 / 4096 of a step
_ACTIVATION_NAMES = (
    *("NONE", "CLAMP", "SWISH", "HARDSWISH", "GELU", "GELU_TANH", "TANH", "LEAKY", "GELU_BYTES"),
)
_DEPTHWISE = ("NONE", "CLAMP", "SWISH", "HARDSWISH")


@dataclass(frozen=True)
class Shape:
    """The geometry of a convolution. ``weight`` is ``[out, in / groups, height, width]``; the other fields
    have two numbers, for height and width.
    """

    weight: tuple[int, ...]
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1

    @property
    def depthwise(self) -> bool:
        return self.groups > 1 and self.weight[1] == 1 and self.weight[0] == self.groups

    @property
    def rows(self) -> bool:
        """Whether the taps of one row of the kernel are read as one."""
        return self.groups == 1 and reads_rows(self.weight, self.dilation)

    @property
    def spans(self) -> bool:
        """Whether several groups are computed at a time."""
        return not self.depthwise and self.groups > 1 and spans(self.weight, self.groups)

    @property
    def is_known(self) -> bool:
        """Whether there is a kernel for it.

        >>> Shape((8, 8, 3, 3)).is_known, Shape((8, 1, 3, 3), groups=8).is_known
        (True, True)
        >>> Shape((8, 4, 3, 3), groups=2).is_known, Shape((6, 3, 3, 3), groups=2).is_known
        (True, False)
        """
        channels, deep, height, width = self.weight
        if self.depthwise:
            square = height == width and self.stride in ((1, 1), (2, 2))
            return square and height in (3, 5, 7) and self.dilation == (1, 1)
        taps = height if self.rows else height * width
        whole = self.groups == 1 or (deep % 4 == 0 and channels % self.groups == 0)
        return whole and taps <= TAPS


def is_known(shape: Shape, result: Result) -> bool:
    """Whether the library computes this; on this CPU or not."""
    known = result.is_known and shape.is_known
    return known and (not shape.depthwise or (result.activation or "NONE") in _DEPTHWISE)


def magic(layout: Layout) -> int:
    """What ``backquant_plan_layout`` of a library that reads such weights gives."""
    return _MAGIC + layout.lanes * 10 + layout.order.value + 1000 * layout.tiles


def plan(
    shape: Shape,
    weights: Weights,
    x: tuple[float, int],
    result: Result,
    other: tuple[float, int] | None = None,
    layout: Layout = AVX512_LAYOUT,
) -> torch.Tensor:
    """The plan of a layer that ``is_known``, as uint8.

    ``x``: scale and zero point of the input; ``other``: of what is added before the result is rounded. A
    linear layer is a convolution of 1×1.
    """
    weight, depthwise = weights.weight.reshape(shape.weight), shape.depthwise
    channels, deep, height, width = shape.weight
    rows = not depthwise and shape.rows
    is_float = result.dtype == torch.float32
    order = partial(by_lane, lanes=layout.lanes) if depthwise else by_channel
    sums = row_sums(weights.weight)
    exact = is_float or _is_large(x[1] * sums * (weights.scale * (x[0] / result.scale)))
    zero = (x[1] if exact else 0) - layout.offset  # of the inputs, as the kernels count them
    found = epilogue(result, weights, x[0], 0 if exact else x[1], order)
    if other is not None:
        found = found.adding(*other)
    members = 1 if depthwise else shape.groups
    blocks, step = _blocks(shape, layout)
    if depthwise:
        packed = pack_depthwise(weight[:, 0], layout)
    elif shape.spans:
        packed = pack_spans(weight, layout)
    else:
        taps = weight.permute(0, 2, 3, 1)
        taps = taps.reshape(channels, height, -1) if rows else taps.reshape(channels, -1, deep)
        packed = torch.cat([pack(own, blocks, layout) for own in taps.chunk(members)])
    parts = [packed, found.scale, found.shift]
    if zero:
        parts.append(order((zero * sums).int()))
    offsets, total = _places(parts)
    numbers = (
        *(magic(layout), total, depthwise, shape.groups * deep, channels),
        *(height, 1 if rows else width, *shape.stride, *shape.padding, *shape.dilation),
        1 if depthwise else deep * width if rows else deep,
        *(blocks.columns, blocks.count, blocks.last, blocks.tail, members, shape.spans, step),
        *(_ACTIVATION_NAMES.index(found.activation), is_float, other is not None, x[1]),
        *(*offsets, *[0] * (4 - len(offsets))),
    )
    head = struct.pack(f"<{len(numbers)}q{len(found.numbers)}f", *numbers, *found.numbers)
    made = torch.zeros(total, dtype=torch.uint8)
    for offset, part in zip((0, *offsets), (_bytes(head), *parts), strict=True):
        values = part.contiguous().view(torch.uint8)
        made[offset : offset + values.numel()] = values
    return made


def _blocks(shape: Shape, layout: Layout) -> tuple[Blocks, int]:
    """And the step of the tiles that compute it; 0: none do."""
    channels, deep, height, width = shape.weight
    members = 1 if shape.depthwise else shape.groups
    if layout.tiles and members == 1 and not shape.depthwise:
        taps, run = (height, deep * width) if shape.rows else (height * width, deep)
        step = tap_step(taps, run, channels)
        if step is not None:
            return choose_tiles(channels), step
    return choose_blocks(1, channels // members, layout.lanes), 0


def _is_large(steps: torch.Tensor) -> bool:
    """Whether the rounding of so many steps of the result to 24 bits may be seen."""
    return bool(steps.abs().amax() > _LARGE)


def _bytes(head: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(head), dtype=torch.uint8)


def _places(parts: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    found, place = [], _HEAD
    for part in parts:
        found.append(place)
        size = part.numel() * part.element_size()
        place += math.ceil(size / _ALIGNED) * _ALIGNED
    return found, place
