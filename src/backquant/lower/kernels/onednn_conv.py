"""What the convolutions of oneDNN have in common: some geometries are computed as another convolution."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import Self

from backquant.lower.kernels.geometry import Geometry, least_sizes, output_size, rewrite
from backquant.lower.kernels.packed import PackedKernel, WeightTensors
from backquant.lower.kernels.planned import Planned
from backquant.lower.kernels.prepared import is_plain
from backquant.lower.kernels.self_check import is_right_here
from backquant.lower.kernels.zero_point import Padding, fold_zero_point, pad_with

_LINE = (-1,)  # among the keys of replacements, which are strides with dilations


class OnednnConvolution(PackedKernel):
    """A convolution with its own padding, and the convolutions that replace it for some inputs.

    Small images are rewritten for a geometry without padding, and what oneDNN computes wrongly on this
    machine is a 1×1 convolution over gathered windows. ``config`` is a dataclass with ``stride``,
    ``padding``, ``dilation`` and ``groups``. A subclass sets ``_padding`` and ``_planned``.
    """

    _geometry: tuple[Any, ...]
    _padding: Padding
    _planned: Planned

    def __init__(self, config: Any, tensors: WeightTensors) -> None:
        super().__init__(config, tensors)
        kernel = tuple(tensors.weight.shape[2:])
        self._window = Geometry(kernel, config.stride, config.padding, config.dilation)
        self._least = least_sizes(self._window)
        self._is_point = {*kernel, *config.stride} == {1}
        self._replacements: dict[tuple[int, ...], Self] = {}

    def _without_padding(self, stride: tuple[int, ...], dilation: tuple[int, ...]) -> Self:
        """The convolution with another stride and dilation, without padding."""
        key = (*stride, *dilation)
        found = self._replacements.get(key)
        if found is None:
            none = (0,) * len(stride)
            config = replace(self.config, stride=stride, dilation=dilation, padding=none)
            found = self._replacements[key] = type(self)(config, self.tensors())
        return found

    def _pack(self, size: tuple[int, ...]) -> Any:
        c, padding = self.config, self._padding
        bias = fold_zero_point(self.weight, self.weight_scale, self.bias, c.x_scale, padding.folded)
        weight = torch.ops.onednn.qconv_prepack(
            self.weight,
            self.weight_scale,
            c.x_scale,
            padding.zero_point,
            *self._geometry,
            [1, self.weight.shape[1] * c.groups, *size],
        )
        return weight, bias

    def _instead(self, x: torch.Tensor) -> tuple[Self, torch.Tensor] | None:
        """The convolution of another input that gives what oneDNN would not for ``x``; ``None``: it does."""
        size, zero_point = x.shape[2:], self.config.x_zero_point
        if x.numel() and any(n < least for n, least in zip(size, self._least, strict=True)):
            other = rewrite(tuple(size), self._window)
            if other is not None:
                made = self._without_padding(other.stride, other.dilation)
                return made, other.applied(x, zero_point)
        if not self._is_right(x):
            return self._over_windows(), gathered(x, self._window, zero_point)
        return None

    def _lying(self, x: torch.Tensor) -> Self | None:
        """The convolution that slides along a line where this one slides along a column: the same memory, and
        with few channels oneDNN takes several times as long for a column. ``None``: ``x`` is not one, or the
        kernel has taps beside it."""
        kernel, c = self._window.kernel, self.config
        if len(kernel) != 2 or kernel[1] != 1 or kernel[0] == 1 or c.padding[1] or x.shape[3] != 1:
            return None
        found = self._replacements.get(_LINE)
        if found is None:
            tensors = self.tensors()
            weight = tensors.weight.transpose(2, 3).contiguous()
            turned = {name: getattr(c, name)[::-1] for name in ("stride", "padding", "dilation")}
            made = type(self)(replace(c, **turned), replace(tensors, weight=weight))
            found = self._replacements[_LINE] = made
        return found

    def _over_windows(self) -> Self:
        """The 1×1 convolution over ``gathered`` windows."""
        found = self._replacements.get(())
        if found is None:
            made = as_point(self.config, self.tensors())
            found = self._replacements[()] = type(self)(*made)
        return found

    def _is_right(self, x: torch.Tensor) -> bool:
        """Whether oneDNN computes this shape rightly here. A 1×1 convolution is a product."""
        if self._is_point or not is_plain(x):
            return True
        shapes = tuple(x.shape), tuple(self.weight.shape)
        groups, zero_point = self.config.groups, self._padding.zero_point
        return is_right_here(*shapes, self._window, groups, zero_point)

    def _drop(self) -> None:
        super()._drop()
        self._planned.drop()

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        yield from super().packed_tensors()
        yield from self._planned.tensors
        for made in tuple(self._replacements.values()):
            yield from made.buffers()
            yield from made.packed_tensors()

    def _derived(self) -> dict[str, Any]:
        return {**super()._derived(), "_replacements": {}}


# Convolutions as products of gathered patches, for shapes that oneDNN computes wrongly.
#
# Every window becomes one pixel that holds all its values as channels, and the kernel a 1×1 convolution over
# them: the same sums of the same integers. It takes the memory of all windows, and longer.


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
