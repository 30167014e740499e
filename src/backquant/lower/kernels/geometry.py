"""Geometries of convolutions that oneDNN computes wrongly, and the same convolutions in others.

Measured on torch 2.13 (``docs/kernels.md``), of 2d and 3d convolutions with integer inputs:

1. A window that lies in the padding as a whole: undefined values, or a crash.
2. Results of width 1 with a stride above 1 along the width, on AMX: wrong rows.
3. In 3d, padding along a depth of 1: wrong values.
4. In 3d, a stride above the kernel's size on AMX: memory beyond the buffers is written.

The padding is done beforehand, and the taps along the axis of 2 and 4 are laid side by side: the sums are the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from backquant.lower.kernels.zero_point import pad_with


@dataclass(frozen=True)
class Geometry:
    """``kernel``, ``stride``, ``padding`` and ``dilation`` have one number per spatial dimension."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def reach(self) -> list[int]:
        """How far a window extends."""
        return [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]


def output_size(size: Sequence[int], geometry: Geometry) -> list[int]:
    """The spatial size of the result for inputs of spatial ``size``.

    >>> output_size([8, 9], Geometry((3, 3), (2, 2), (1, 1), (1, 1)))
    [4, 5]
    """
    parts = zip(size, geometry.padding, geometry.reach, geometry.stride, strict=True)
    return [(n + 2 * p - r) // s + 1 for n, p, r, s in parts]


@dataclass(frozen=True)
class Rewrite:
    """An equal convolution without padding. ``spread``: axes whose taps are laid side by side, with the
    size of the result there."""

    before: Geometry
    spread: tuple[tuple[int, int], ...]

    @property
    def stride(self) -> tuple[int, ...]:
        found = list(self.before.stride)
        for axis, out in self.spread:
            found[axis] = self.before.kernel[axis] if out > 1 else 1
        return tuple(found)

    @property
    def dilation(self) -> tuple[int, ...]:
        spread = dict(self.spread)
        return tuple(1 if axis in spread else d for axis, d in enumerate(self.before.dilation))

    def applied(self, x: torch.Tensor, zero_point: int) -> torch.Tensor:
        """What takes the place of the input ``[batch, channels, ...]``."""
        if any(self.before.padding):
            x = pad_with(x, self.before.padding, zero_point)
        for axis, out in self.spread:
            starts = torch.arange(out).mul(self.before.stride[axis]).unsqueeze(1)
            taps = torch.arange(self.before.kernel[axis]).mul(self.before.dilation[axis])
            x = x.index_select(axis + 2, (starts + taps).flatten())
        return x


def least_sizes(geometry: Geometry) -> tuple[int, ...]:
    """Inputs of at least these spatial sizes need no rewrite; sizes that no input has where all need one.

    >>> least_sizes(Geometry((3, 3), (1, 2), (1, 0), (1, 1)))
    (3, 5)
    """
    g, least = geometry, list(geometry.reach)
    if len(least) == 1:
        return (0,) if g.padding[0] < least[0] else (1 << 60,)
    least[-1] = max(least[-1], g.reach[-1] - 2 * g.padding[-1] + g.stride[-1])
    if any(p >= r for p, r in zip(g.padding, g.reach, strict=True)) or _gaps(g):
        least[0] = 1 << 60
    if len(least) == 3 and g.padding[0]:
        least[0] = max(least[0], 2)
    return tuple(least)


def _gaps(geometry: Geometry) -> list[int]:
    """The axes of case 4."""
    steps = zip(geometry.stride, geometry.kernel, strict=True)
    return [axis for axis, (s, k) in enumerate(steps) if s > k] if len(geometry.stride) == 3 else []


@lru_cache(maxsize=1024)
def rewrite(size: tuple[int, ...], geometry: Geometry) -> Rewrite | None:
    """How to compute a convolution of inputs of spatial ``size``, if not as it is.

    >>> geometry = Geometry((3, 3), (2, 2), (0, 0), (1, 1))
    >>> rewrite((12, 8), geometry) is None, rewrite((12, 4), geometry).stride
    (True, (2, 1))
    """
    out = output_size(size, geometry)
    dims = len(size)
    spread = set(_gaps(geometry))
    if dims > 1 and out[-1] == 1 and geometry.stride[-1] > 1:
        spread.add(dims - 1)
    lone = dims == 3 and size[0] == 1 and geometry.padding[0] > 0
    if not spread and not lone and not _has_empty_window(size, out, geometry):
        return None
    return Rewrite(geometry, tuple((axis, out[axis]) for axis in sorted(spread)))


def _has_empty_window(size: Sequence[int], out: Sequence[int], geometry: Geometry) -> bool:
    """Whether some window lies in the padding as a whole."""
    return any(
        all(not 0 <= i * s - p + tap * d < n for tap in range(k))
        for n, o, k, s, p, d in zip(
            size, out, geometry.kernel, geometry.stride, geometry.padding, geometry.dilation,
            strict=True,
        )
        for i in range(o)
    )  # fmt: skip
