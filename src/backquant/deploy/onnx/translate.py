"""Torch operators as ONNX operators, where the exporter's own translation does not suit a quantized graph.

1. ``QuantizeLinear`` saturates at the bounds of the integer type; narrower bounds are clipped before it,
   in float (an integer ``Clip`` behind it would keep every runtime from seeing the pair).
2. Zero points have the type of the integers; the axis is written out.
3. Pooling to one value is ``GlobalAveragePool``, which has integer kernels; the exporter's ReduceMean has
   none.
4. GELU is written in the order of operators that runtimes recognise and fuse.
5. A dynamically quantized activation is ``DynamicQuantizeLinear``.
6. ``input_scale`` of ELU is a factor of what is below zero only; the exporter has it as one of all values.

Sources: ONNX operator documentation, QuantizeLinear-13, DequantizeLinear-13, DynamicQuantizeLinear-11,
GlobalAveragePool-1.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from backquant.deploy.job import ExportJob
from backquant.dtypes import block_of
from backquant.errors import ExportError, UsageError, first_line
from backquant.operators import overload, overloads

# Pooling as ONNX has it: the exporter drops ``divisor_override``; runtimes differ in ``ceil_mode``.
#
# 1. ``AveragePool`` without ``ceil_mode`` is what all runtimes compute alike; it stands alone wherever that
# is    what is asked for. 2. Another divisor: a convolution of each channel whose weights are all one over
# it. 3. Ceil mode that gives more windows than floor mode: such sums of windows, made whole by padding,
# over the    numbers of values that PyTorch divides by. The sizes have to be known for that.    Averages
# times a factor are not written for 2 and 3: OpenVINO rounds the averages of integers, which the    factor
# makes large, and pads them with its zero in place of the zero point. 4. Maxima in ceil mode: runtimes and
# ONNX's own inference of shapes differ in windows that start in the    padding behind the input. Padding
# that makes PyTorch's last window whole stands for ceil mode. That mode is    written for free sizes alone,
# where no window can start in the padding; known and free axes are pooled one    after the other.


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


def _axes(x: Any, ceil: bool, *windows: Sequence[int]) -> list[_Axis]:
    """``windows``: kernel, stride (empty: the kernel) and padding, along the last axes of ``x``."""
    kernels, strides, paddings = windows
    sizes = list(x.shape)[-len(kernels) :]
    parts = zip(sizes, kernels, strides or kernels, paddings, strict=True)
    return [_Axis(*part, bool(ceil)) for part in parts]


def _average_pool(
    self: Any,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = (0, 0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """Raises ``ExportError`` for ceil mode on free sizes."""
    axes = _axes(self, ceil_mode, kernel_size, stride, padding[: len(kernel_size)])
    whole = not any(axis.differs for axis in axes)
    write = _of_whole_windows if whole else _with_partial_windows
    return write(self, axes, bool(count_include_pad), divisor_override)


def _max_pool(
    self: Any,
    kernel_size: Any,
    stride: Any = (),
    padding: Any = (0, 0, 0),
    dilation: Any = (1, 1, 1),
    ceil_mode: bool = False,
) -> Any:
    """Raises ``ExportError`` for ceil mode on free sizes, but for windows that all start in the input."""
    dims = len(kernel_size)
    dilations, strides = dilation[:dims], stride or kernel_size
    extents = [gap * (kernel - 1) + 1 for gap, kernel in zip(dilations, kernel_size, strict=True)]
    axes = _axes(self, ceil_mode, extents, strides, padding[:dims])
    free = [axis for axis in axes if axis.differs and not isinstance(axis.size, int)]
    if any(axis.padding + axis.stride > axis.kernel for axis in free):
        raise _free_ceil_mode("max_pool", axes)
    if not free:
        return _maxima(self, axes, dilations)
    whole = [axis if axis in free else _Axis(axis.size, 1, 1, 0, False) for axis in axes]
    rest = [_Axis(axis.size, 1, 1, 0, False) if axis in free else axis for axis in axes]
    return _maxima(_maxima(self, rest, dilations), whole, dilations)


def _maxima(x: Any, axes: Sequence[_Axis], dilations: Sequence[int]) -> Any:
    """Rule 4; of the axes on which ceil mode differs, all have a known size, or none has."""
    op = _op()
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
    op = _op()
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
    if not all(isinstance(axis.size, int) for axis in axes):
        raise _free_ceil_mode("avg_pool", axes)
    if divisor is not None:
        return _sums(x, axes, 1 / divisor)
    counts = np.ones((), np.float64)
    for axis in axes:
        counts = counts[..., None] * np.asarray(axis.counts(with_padding), np.float64)
    return _op().Mul(_sums(x, axes, 1.0), _floats(1 / counts))


def _sums(x: Any, axes: Sequence[_Axis], weight: float) -> Any:
    """The sum of each window, times ``weight``."""
    kernels, channels = [axis.kernel for axis in axes], int(x.shape[1])
    ends = [axis.padding + (axis.appended if axis.differs else 0) for axis in axes]
    return _op().Conv(
        x,
        _floats(np.full((channels, 1, *kernels), weight)),
        group=channels,
        kernel_shape=kernels,
        strides=[axis.stride for axis in axes],
        pads=[*(axis.padding for axis in axes), *ends],
    )


def _floats(value: Any) -> Any:
    return _constant(np.asarray(value, np.float32), 1)


#: By torch overload, as ``torch.onnx.export(custom_translation_table=...)`` takes it.
Table = dict[Callable[..., Any], Callable[..., Any]]
_BOUNDS = {2: (0, 255), 3: (-128, 127), 4: (0, 65535), 5: (-32768, 32767)}  # by ONNX type
_ADAPTIVE = ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")


def translations() -> Table:
    """The table of this package."""
    ops = torch.ops.quantized_decomposed
    return {
        ops.quantize_per_tensor.default: quantize_linear,
        ops.dequantize_per_tensor.default: _dequantize_per_tensor,
        ops.quantize_per_channel.default: _quantize_per_channel,
        ops.dequantize_per_channel.default: _dequantize_per_channel,
        ops.choose_qparams.tensor: _choose_qparams,
        ops.quantize_per_tensor.tensor: _quantize_dynamic,
        ops.dequantize_per_tensor.tensor: _dequantize_dynamic,
        torch.ops.backquant.quantize_float8.default: _quantize_float8,
        torch.ops.backquant.dequantize_float8.default: _dequantize_float8,
        torch.ops.backquant.dequantize_blocks.default: _dequantize_blocks,
        **dict.fromkeys(overloads("gelu"), _gelu),
        overload("elu"): _elu,
        **dict.fromkeys(overloads(*_ADAPTIVE), _adaptive_avg_pool),
        **{overload(f"avg_pool{dims}d"): _average_pool for dims in (1, 2, 3)},
        **{overload(f"max_pool{dims}d"): _max_pool for dims in (1, 2, 3)},
        overload("adaptive_max_pool2d"): _adaptive_max_pool,
        overload("adaptive_max_pool3d"): _adaptive_max_pool,
    }


def own_translations(job: ExportJob) -> Table:
    """The table of the option ``translations``, or that ``"module:NAME"`` names.

    Raises ``UsageError`` for anything else.
    """
    given = job.options.get("translations", {})
    if isinstance(given, str):
        module, _, name = given.partition(":")
        try:
            given = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise _no_table(f"there is none: {first_line(error)}", job) from error
    if not isinstance(given, Mapping) or not all(map(_is_translation, given.items())):
        raise _no_table("it is no mapping from overloads to functions", job)
    return dict(given)


def _is_translation(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], torch._ops.OpOverload) and callable(item[1])


def _no_table(why: str, job: ExportJob) -> UsageError:
    return UsageError(
        f"the table of translations cannot be read: {why}",
        where=f"translations={job.options['translations']!r}",
        fix='{torch.ops.acme.gate.default: function}, or "module:NAME" of such a table',
    )


def _op(version: int = 18) -> Any:
    import onnxscript

    return getattr(onnxscript, f"opset{version}")


def _constant(value: Any, dtype: int) -> Any:
    from onnxscript import ir

    return _op().Constant(value=ir.tensor(value, dtype=ir.DataType(dtype)))


def _float(value: float) -> Any:
    return _constant(value, 1)


def _clipped(x: Any, scale: float, zero_point: int, bounds: tuple[int, int, int]) -> Any:
    """Rule 1."""
    low, high, dtype = bounds
    if (low, high) == _BOUNDS.get(dtype, (low, high)):
        return x
    edges = ((low - zero_point) * scale, (high - zero_point) * scale)
    return _op().Clip(x, *map(_float, edges))


def quantize_linear(
    input: Any,
    scale: float,
    zero_point: int,
    quant_min: int,
    quant_max: int,
    dtype: int,
    *,
    clips: bool = True,
) -> Any:
    """``QuantizeLinear``; ``clips``: to bounds that are narrower than the dtype."""
    bounds = (quant_min, quant_max, dtype)
    x = _clipped(input, scale, zero_point, bounds) if clips else input
    return _op().QuantizeLinear(x, _float(scale), _constant(zero_point, dtype))


def _in(made: Any, dtype: int | None) -> Any:
    """``made`` in another dtype than float32, where one is asked for."""
    return made if dtype in (-1, None, 1) else _op().Cast(made, to=dtype)


def _dequantize_per_tensor(
    input: Any, scale: float, zero_point: int, *bounds: int, out_dtype: int = -1
) -> Any:
    zero = _constant(zero_point, bounds[-1])
    return _in(_op().DequantizeLinear(input, _float(scale), zero), out_dtype)


def _float8_zero(dtype: int) -> Any:
    """A zero point says which format of 8-bit floats is meant."""
    from onnxscript import ir

    return _op().Constant(value=ir.Tensor(np.zeros((), ir.DataType(dtype).numpy())))


def _quantize_float8(input: Any, scale: float, dtype: int) -> Any:
    return _op(19).QuantizeLinear(input, _float(scale), _float8_zero(dtype))


def _dequantize_float8(input: Any, scale: float) -> Any:
    return _op(19).DequantizeLinear(input, _float(scale))


def _dequantize_blocks(input: Any, scale: Any, zero_point: Any) -> Any:
    block = block_of(list(input.shape), list(scale.shape)) or ()
    axes = [axis for axis, size in enumerate(block) if size > 1] or [len(block) - 1]
    if len(axes) > 1:
        raise ExportError(
            f"ONNX has blocks along one axis, not of {' × '.join(map(str, block))}",
            where="DequantizeLinear, block_size",
            fix='granularity="per_group(size=...)"',
        )
    size = block[axes[0]]
    return _op(21).DequantizeLinear(input, scale, zero_point, axis=axes[0], block_size=size)


def _quantize_per_channel(
    input: Any, scales: Any, zero_points: Any, axis: int, *bounds: int
) -> Any:
    zeros = _op().Cast(zero_points, to=bounds[-1])
    return _op().QuantizeLinear(input, scales, zeros, axis=axis)


def _dequantize_per_channel(
    input: Any, scales: Any, zero_points: Any, axis: int, *bounds: int, out_dtype: int = -1
) -> Any:
    zeros = _op().Cast(zero_points, to=bounds[-1])
    return _in(_op().DequantizeLinear(input, scales, zeros, axis=axis), out_dtype)


def _choose_qparams(
    input: Any,
    quant_min: int,
    quant_max: int,
    eps: float,  # noqa: ARG001
    dtype: int,
) -> Any:
    if (dtype, quant_min, quant_max) != (2, 0, 255):
        raise ExportError(
            f"ONNX quantizes dynamically to [0, 255], not to [{quant_min}, {quant_max}]",
            where="DynamicQuantizeLinear",
            fix='the default dynamic QConfig of backend="onnxruntime"',
        )
    _, scale, zero_point = _op().DynamicQuantizeLinear(input)
    return scale, zero_point


def _quantize_dynamic(input: Any, scale: Any, zero_point: Any, *_: int) -> Any:
    return _op().QuantizeLinear(input, scale, zero_point)


def _dequantize_dynamic(input: Any, scale: Any, zero_point: Any, *_: int, **__: int) -> Any:
    return _op().DequantizeLinear(input, scale, zero_point)


def _gelu(self: Any, approximate: str = "none") -> Any:
    """Rule 4: x * (1 + erf(x / √2)) * 0.5, or its approximation by tanh."""
    op = _op()
    if approximate == "tanh":
        cube = op.Mul(op.Mul(op.Mul(self, self), self), _float(0.044715))
        inner = op.Mul(op.Add(self, cube), _float(math.sqrt(2.0 / math.pi)))
        return op.Mul(op.Mul(self, op.Add(op.Tanh(inner), _float(1.0))), _float(0.5))
    error = op.Erf(op.Div(self, _float(math.sqrt(2.0))))
    return op.Mul(op.Mul(self, op.Add(error, _float(1.0))), _float(0.5))


def _elu(self: Any, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Any:
    """Rule 6: scale * (max(x, 0) + alpha * (exp(input_scale * min(x, 0)) - 1))."""
    op = _op()
    if input_scale == 1:
        made = op.Elu(self, alpha=float(alpha))
    else:
        below = op.Mul(op.Min(self, _float(0.0)), _float(input_scale))
        curve = op.Mul(op.Sub(op.Exp(below), _float(1.0)), _float(alpha))
        made = op.Add(op.Relu(self), curve)
    return made if scale == 1 else op.Mul(made, _float(scale))


def _adaptive_avg_pool(self: Any, output_size: Any) -> Any:
    """Rule 3; other sizes as one average pooling where they divide the input's, else axis by axis."""
    wanted = list(output_size)
    if all(size == 1 for size in wanted):
        return _op().GlobalAveragePool(self)
    have = list(self.shape)[-len(wanted) :]
    if not all(isinstance(size, int) for size in have):
        raise _unknown(wanted, have)
    if any(h % w for h, w in zip(have, wanted, strict=True)):
        return _averaged(self, have, wanted)
    kernel = [h // w for h, w in zip(have, wanted, strict=True)]
    assert math.prod(kernel) > 0
    return _op().AveragePool(self, kernel_shape=kernel, strides=kernel)


def _adaptive_max_pool(self: Any, output_size: Any) -> Any:
    """The largest values of windows that are all of one size, and where they are in each image."""
    wanted = list(output_size)
    have = list(self.shape)[-len(wanted) :]
    if not all(isinstance(size, int) for size in have):
        raise _unknown(wanted, have)
    if any(h % w for h, w in zip(have, wanted, strict=True)):
        raise ExportError(
            f"ONNX has no adaptive pooling of maxima from {have} to {wanted}: the windows differ in size",
            where="adaptive pooling",
            fix="pool to a size that divides that of the input",
        )
    kernel = [h // w for h, w in zip(have, wanted, strict=True)]
    values, places = _op().MaxPool(self, kernel_shape=kernel, strides=kernel)
    return values, _op().Mod(places, _constant(math.prod(have), 7))


def _averaged(value: Any, have: list[int], wanted: list[int]) -> Any:
    """Windows of several sizes: a product with a constant matrix of averages for each axis."""
    rank = len(value.shape)
    for axis, (size, made) in enumerate(zip(have, wanted, strict=True), rank - len(have)):
        if size == made:
            continue
        turned = list(range(rank))
        turned[axis], turned[-1] = turned[-1], turned[axis]
        averages = _constant(_windows(size, made).T.copy(), 1)
        if axis == rank - 1:
            value = _op().MatMul(value, averages)
            continue
        value = _op().MatMul(_op().Transpose(value, perm=turned), averages)
        value = _op().Transpose(value, perm=turned)
    return value


def _windows(size: int, made: int) -> Any:
    """``[made, size]``: row i averages from floor(i · size / made) to ceil((i + 1) · size / made)."""
    averages = np.zeros((made, size), np.float32)
    for i in range(made):
        first, last = i * size // made, -(-(i + 1) * size // made)
        averages[i, first:last] = 1.0 / (last - first)
    return averages


def _unknown(wanted: list[int], have: list[Any]) -> ExportError:
    return ExportError(
        f"ONNX has no adaptive pooling from {have} to {wanted}: the windows depend on the dynamic size",
        where="adaptive pooling",
        fix="pool to 1, or leave these axes out of dynamic_shapes",
    )
