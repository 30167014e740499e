"""Pooling as ONNX has it: the exporter drops ``divisor_override``; runtimes differ in ``ceil_mode``.

1. ``AveragePool`` without ``ceil_mode`` is what all runtimes compute alike; it stands alone wherever that is
   what is asked for.
2. Another divisor: a convolution of each channel whose weights are all one over it.
3. Ceil mode that gives more windows than floor mode: such sums of windows, made whole by padding, over the
   numbers of values that PyTorch divides by. The sizes have to be known for that.
   Averages times a factor are not written for 2 and 3: OpenVINO rounds the averages of integers, which the
   factor makes large, and pads them with its zero in place of the zero point.
4. Maxima in ceil mode: runtimes and ONNX's own inference of shapes differ in windows that start in the
   padding behind the input. Padding that makes PyTorch's last window whole stands for ceil mode. That mode is
   written for free sizes alone, where no window can start in the padding; known and free axes are pooled one
   after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backquant.errors import ExportError

__all__ = ["average_pool", "max_pool"]


@dataclass(frozen=True)
class _Axis:
    """One pooled axis; ``size`` is no number where it is free. ``kernel``: with the gaps of its dilation."""

    size: Any
    kernel: int
    stride: int
    padding: int
    ceil: bool

    @property
    def floor_windows(self) -> int:
        return int((self.size + 2 * self.padding - self.kernel) // self.stride + 1)

    @property
    def windows(self) -> int:
        """As PyTorch counts them: no window starts behind the input and its left padding.

        >>> _Axis(6, 3, 2, 1, True).windows, _Axis(6, 3, 2, 1, False).windows, _Axis(5, 2, 3, 0, True).windows
        (4, 3, 2)
        """
        if not self.ceil:
            return self.floor_windows
        made = -(-(self.size + 2 * self.padding - self.kernel) // self.stride) + 1
        return int(made - ((made - 1) * self.stride >= self.size + self.padding))

    @property
    def differs(self) -> bool:
        """Whether ceil mode may give another number of windows."""
        if not self.ceil or self.stride == 1:
            return False
        return not isinstance(self.size, int) or self.windows != self.floor_windows

    @property
    def appended(self) -> int:
        """Zeros behind the input and its padding that make the last window whole."""
        needed = (self.windows - 1) * self.stride + self.kernel
        return int(max(0, needed - self.size - 2 * self.padding))

    def counts(self, with_padding: bool) -> list[int]:
        """How many values of each window PyTorch divides by.

        >>> _Axis(6, 3, 2, 1, True).counts(True), _Axis(6, 3, 2, 1, True).counts(False)
        ([3, 3, 3, 2], [2, 3, 3, 1])
        """
        least = -self.padding if with_padding else 0
        most = self.size + (self.padding if with_padding else 0)
        starts = [i * self.stride - self.padding for i in range(self.windows)]
        return [min(start + self.kernel, most) - max(start, least) for start in starts]


def average_pool(dims: int) -> Callable[..., Any]:
    """The translation of ``avg_pool1d``, ``2d`` or ``3d``.

    It raises ``ExportError`` for ceil mode on free sizes.
    """

    def translated(
        self: Any,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Any:
        sizes, kernels = list(self.shape)[-dims:], _each(kernel_size, dims)
        strides, paddings = _each(stride or kernel_size, dims), _each(padding, dims)
        parts = zip(sizes, kernels, strides, paddings, strict=True)
        axes = [_Axis(*part, bool(ceil_mode)) for part in parts]
        if any(axis.differs for axis in axes):
            return _with_partial_windows(self, axes, bool(count_include_pad), divisor_override)
        return _of_whole_windows(self, axes, bool(count_include_pad), divisor_override)

    return translated


def max_pool(dims: int) -> Callable[..., Any]:
    """The translation of ``max_pool1d``, ``2d`` or ``3d``.

    It raises ``ExportError`` for ceil mode on free sizes, but for windows that all start in the input.
    """

    def translated(
        self: Any,
        kernel_size: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        sizes, kernels = list(self.shape)[-dims:], _each(kernel_size, dims)
        strides, paddings = _each(stride or kernel_size, dims), _each(padding, dims)
        dilations = _each(dilation, dims)
        extents = [gap * (kernel - 1) + 1 for gap, kernel in zip(dilations, kernels, strict=True)]
        parts = zip(sizes, extents, strides, paddings, strict=True)
        axes = [_Axis(*part, bool(ceil_mode)) for part in parts]
        free = [axis for axis in axes if axis.differs and not isinstance(axis.size, int)]
        if any(axis.padding + axis.stride > axis.kernel for axis in free):
            raise _free_ceil_mode("max_pool", axes)
        if not free:
            return _maxima(self, axes, dilations)
        whole = [axis if axis in free else _Axis(axis.size, 1, 1, 0, False) for axis in axes]
        rest = [_Axis(axis.size, 1, 1, 0, False) if axis in free else axis for axis in axes]
        return _maxima(_maxima(self, rest, dilations), whole, dilations)

    return translated


def _maxima(x: Any, axes: Sequence[_Axis], dilations: Sequence[int]) -> Any:
    """Rule 4; of the axes on which ceil mode differs, all have a known size, or none has."""
    import onnxscript

    op = onnxscript.opset18
    free = any(axis.differs and not isinstance(axis.size, int) for axis in axes)
    gaps = [gap if axis.kernel > 1 else 1 for axis, gap in zip(axes, dilations, strict=True)]
    taps = [(axis.kernel - 1) // gap + 1 for axis, gap in zip(axes, gaps, strict=True)]
    starts = [axis.padding for axis in axes]
    ends = [axis.padding + (axis.appended if axis.differs and not free else 0) for axis in axes]
    # ONNX Runtime takes less padding than taps alone.
    if any(end >= tap for end, tap in zip(ends, taps, strict=True)):
        unpooled = [0] * (len(x.shape) - len(axes))
        pads: Any = op.Constant(value_ints=[*unpooled, *starts, *unpooled, *ends])
        x, starts, ends = op.Pad(x, pads, _floats(-np.inf)), [0] * len(axes), [0] * len(axes)
    values, _ = op.MaxPool(
        x,
        kernel_shape=taps,
        strides=[axis.stride for axis in axes],
        dilations=gaps,
        pads=[*starts, *ends],
        ceil_mode=int(free),
    )
    return values


def _free_ceil_mode(name: str, axes: Sequence[_Axis]) -> ExportError:
    windows = [axis.kernel for axis in axes]
    return ExportError(
        f"{name} with ceil_mode=True on a free size: how many windows there are depends on it",
        where=f"{name}{len(axes)}d(kernel_size={windows}, stride={[axis.stride for axis in axes]}, "
        "ceil_mode=True)",
        fix="leave these axes out of dynamic_shapes, or pool with ceil_mode=False",
    )


def _of_whole_windows(
    x: Any, axes: Sequence[_Axis], with_padding: bool, divisor: int | None
) -> Any:
    """Rules 1 and 2."""
    import onnxscript

    op = onnxscript.opset18
    kernels, pads = [axis.kernel for axis in axes], [axis.padding for axis in axes]
    if divisor not in (None, math.prod(kernels)):
        return _sums(x, axes, 1 / divisor)
    return op.AveragePool(
        x,
        kernel_shape=kernels,
        strides=[axis.stride for axis in axes],
        pads=[*pads, *pads],
        count_include_pad=int(with_padding or divisor is not None),
    )


def _with_partial_windows(
    x: Any, axes: Sequence[_Axis], with_padding: bool, divisor: int | None
) -> Any:
    """Rule 3."""
    import onnxscript

    if not all(isinstance(axis.size, int) for axis in axes):
        raise _free_ceil_mode("avg_pool", axes)
    if divisor is not None:
        return _sums(x, axes, 1 / divisor)
    counts = np.ones((), np.float64)
    for axis in axes:
        counts = counts[..., None] * np.asarray(axis.counts(with_padding), np.float64)
    return onnxscript.opset18.Mul(_sums(x, axes, 1.0), _floats(1 / counts))


def _sums(x: Any, axes: Sequence[_Axis], weight: float) -> Any:
    """The sum of each window, times ``weight``."""
    import onnxscript

    kernels, channels = [axis.kernel for axis in axes], int(x.shape[1])
    ends = [axis.padding + (axis.appended if axis.differs else 0) for axis in axes]
    return onnxscript.opset18.Conv(
        x,
        _floats(np.full((channels, 1, *kernels), weight)),
        group=channels,
        kernel_shape=kernels,
        strides=[axis.stride for axis in axes],
        pads=[*(axis.padding for axis in axes), *ends],
    )


def _each(value: Sequence[int] | int, dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def _floats(value: Any) -> Any:
    import onnxscript
    from onnxscript import ir

    constant: Any = onnxscript.opset18.Constant
    return constant(value=ir.tensor(np.asarray(value, np.float32)))
