"""What the integers of one tensor stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
import torch
from torch import Tensor
from typing_extensions import TypeVar

from backquant.dtypes.granularity import Granularity
from backquant.dtypes.table import (
    dtype_name,
    integer_range,
    is_per_channel,
    is_scaled_float,
    is_symmetric,
    qdtype,
    quantize_bounds,
    storage_dtype,
)
from backquant.errors import ConfigError

ScaleT = TypeVar("ScaleT", default=float)
ZeroPointT = TypeVar("ZeroPointT", default=int)


@dataclass(frozen=True)
class QParams(Generic[ScaleT, ZeroPointT]):
    """``value = (q - zero_point) * scale``, with ``q`` between ``quant_min`` and ``quant_max``.

    ``scale`` and ``zero_point`` are numbers or tensors: of no dimension, or with one entry per slice along
    ``axis``, or with one entry per block of shape ``block``. They are None if values are only cast, and if
    they are computed at each call (``is_dynamic``; the scale is then at least ``eps``). A dynamic tensor has
    one scale, or with ``per_token`` one for each slice along the last axis, or with ``groups`` one for each
    group or block, stored in ``scale_dtype``. ``dtype`` is a quantized dtype or its storage.

    >>> q = QParams(0.5, 10, 0, 127, torch.uint8)
    >>> q.is_full_range, q.bounds, str(q)
    (False, (-5.0, 58.5), 'uint8 [0, 127] scale 0.5 zero point 10')
    """

    scale: ScaleT
    zero_point: ZeroPointT
    quant_min: int
    quant_max: int
    dtype: torch.dtype
    axis: int | None = None
    block: tuple[int, ...] | None = None
    qscheme: torch.qscheme | None = None
    is_dynamic: bool = False
    eps: float = 0.0
    per_token: bool = False
    groups: Granularity | None = None
    scale_dtype: torch.dtype | None = None

    @property
    def storage(self) -> torch.dtype:
        """The dtype of the tensor that holds the quantized values."""
        return storage_dtype(self.dtype)

    @property
    def is_full_range(self) -> bool:
        """Whether the integers may take every value of the dtype."""
        low, high = integer_range(self.dtype) or (self.quant_min, self.quant_max)
        return self.quant_min <= low and self.quant_max >= high

    @property
    def per_channel(self) -> bool:
        """Whether there is one scale per slice along ``axis``."""
        return self.axis is not None or is_per_channel(self.qscheme)

    @property
    def number(self) -> QParams:
        """The same with numbers for tensors and the storage for the token; needs a single scale."""
        scale: Any = self.scale
        zero_point: Any = self.zero_point
        ends = self.quant_min, self.quant_max
        return QParams(float(scale), int(zero_point), *ends, self.storage)

    @property
    def bounds(self: QParams) -> tuple[float, float]:
        """The float values of ``quant_min`` and ``quant_max``."""
        return (
            (self.quant_min - self.zero_point) * self.scale,
            (self.quant_max - self.zero_point) * self.scale,
        )

    @property
    def args(self: QParams) -> tuple[float, int]:
        """Scale and zero point, as kernels take them."""
        return self.scale, self.zero_point

    @property
    def literals(self: QParams) -> tuple[float, int, int, int, torch.dtype]:
        """The arguments of a quantize or dequantize node after its tensor."""
        return self.scale, self.zero_point, self.quant_min, self.quant_max, self.dtype

    def __str__(self) -> str:
        text = f"{dtype_name(self.dtype)} [{self.quant_min}, {self.quant_max}]"
        if isinstance(self.scale, float | int):
            text += f" scale {self.scale:.6g} zero point {self.zero_point}"
        return text


#: Of weights: scale and zero point are tensors.
TensorQParams = QParams[torch.Tensor, torch.Tensor]

#: Of what was observed: None where nothing is measured before inference.
ObservedQParams = QParams["torch.Tensor | None", "torch.Tensor | None"]


# From the range that values were measured in to scale and zero point.


@dataclass(frozen=True)
class QuantRange:
    """The integer range that a tensor is quantized to, and the scheme.

    ``customized`` is true when the user gave both bounds.
    """

    dtype: torch.dtype
    qscheme: torch.qscheme
    quant_min: int
    quant_max: int
    customized: bool = False

    @property
    def is_symmetric(self) -> bool:
        """Whether the zero point is fixed; narrow floats have none in any scheme."""
        return is_symmetric(self.qscheme) or is_scaled_float(self.dtype)

    @property
    def symmetric_zero_point(self) -> int:
        """The zero point of a symmetric scheme: of a range that the user gave, its middle."""
        middle = qdtype(self.dtype).middle
        return (self.quant_min + self.quant_max) // 2 if middle and self.customized else middle


def resolve_range(
    dtype: torch.dtype, quant_min: int | None, quant_max: int | None, reduce_range: bool
) -> tuple[int, int]:
    """The bounds that an observer works with: the user's if both are given, else the dtype's.

    ``reduce_range`` halves either. Raises ConfigError when the user's range does not hold zero, is
    empty, or is wider than the dtype.

    >>> resolve_range(torch.qint8, -127, 127, False)
    (-127, 127)
    """
    if quant_min is None or quant_max is None:
        return quantize_bounds(dtype, reduce_range)
    where = f"quant_min={quant_min}, quant_max={quant_max}, dtype={dtype}"
    low, high = quantize_bounds(dtype)
    fix = f"use bounds within quant_min={low}, quant_max={high}"
    if quant_min >= quant_max:
        raise ConfigError("quant_min must be less than quant_max", where=where, fix=fix)
    if not quant_min <= 0 <= quant_max:
        raise ConfigError("the quantization range must include 0", where=where, fix=fix)
    limit = high - low + 1
    if quant_max - quant_min + 1 > limit:
        raise ConfigError(
            f"the quantization range has more than {limit} values", where=where, fix=fix
        )
    if reduce_range:
        return quant_min // 2, quant_max // 2
    return quant_min, quant_max


def affine_qparams(
    min_val: Tensor, max_val: Tensor, target: QuantRange, eps: Tensor
) -> tuple[Tensor, Tensor]:
    """Scale and zero point for values between ``min_val`` and ``max_val``.

    Args: ``min_val`` and ``max_val`` of shape ``[]`` or ``[channels]``, min ≤ max; ``eps`` of
    shape ``[1]`` is the smallest scale. Returns float32 scale and int64 (symmetric), int32
    (affine) or float32 (float-qparams) zero point, of shape ``[1]`` or ``[channels]``.

    Cases (as PyTorch's observers compute them):

    1. symmetric: the larger magnitude reaches half the range; the zero point is 0, or the middle
       of an unsigned range.
    2. float-qparams: the range is not widened to hold zero, the zero point is real.
    3. affine: the range is widened to hold zero, which is then exactly representable.

    *Different:* a range wider than the largest float gets a scale with which no integer stands for infinity.

    >>> target = QuantRange(torch.quint8, torch.per_tensor_affine, 0, 255)
    >>> affine_qparams(torch.tensor(-1.0), torch.tensor(1.55), target, torch.tensor([1e-7]))
    (tensor([0.0100]), tensor([100], dtype=torch.int32))
    """
    span = float(target.quant_max - target.quant_min)
    zero = torch.zeros_like(min_val)
    low, high = torch.minimum(min_val, zero), torch.maximum(max_val, zero)
    if target.is_symmetric:  # case 1
        scale = torch.maximum(torch.maximum(-low, high) / (span / 2), eps)
        zero_point = torch.full_like(low, target.symmetric_zero_point, dtype=torch.int64)
        scale = torch.where(scale < _LARGE, scale, _finite(scale, zero_point, target))
    elif target.qscheme == torch.per_channel_affine_float_qparams:  # case 2
        scale = (max_val - min_val) / span
        scale = torch.where(scale > eps, scale, torch.ones_like(scale))
        zero_point = -1 * min_val / scale
    else:  # case 3
        scale = torch.maximum((high - low) / span, eps)
        scale = torch.where(scale < _LARGE, scale, high / span - low / span)
        zero_point = target.quant_min - torch.round(low / scale).to(torch.int32)
        zero_point = torch.clamp(zero_point, target.quant_min, target.quant_max)
        scale = torch.where(scale < _LARGE, scale, _finite(scale, zero_point, target))
    return torch.atleast_1d(scale), torch.atleast_1d(zero_point)


_LARGE = 1e35  # scales above may reach further than the largest float


def _finite(scale: Tensor, zero_point: Tensor, target: QuantRange) -> Tensor:
    """``scale``, or the largest with which each integer stands for a float."""
    reach = torch.maximum(zero_point - target.quant_min, target.quant_max - zero_point)
    reach = reach.to(scale.dtype)
    # Divided, not multiplied with a reciprocal, which is what PyTorch makes of number / tensor.
    limit = torch.full_like(scale, torch.finfo(torch.float32).max) / reach
    below = torch.nextafter(limit, torch.zeros_like(limit))
    limit = torch.where((limit * reach).isfinite(), limit, below)
    return torch.minimum(scale, limit)


def array_qparams(
    min_val: np.ndarray[Any, Any], max_val: np.ndarray[Any, Any], target: QuantRange, eps: float
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """``affine_qparams`` for NumPy arrays (float32 ``[n]``) and per-tensor schemes; the same bits.

    >>> target = QuantRange(torch.quint8, torch.per_tensor_affine, 0, 255)
    >>> low, high = np.array([-1.0], np.float32), np.array([1.55], np.float32)
    >>> [part.tolist() for part in array_qparams(low, high, target, 1e-7)]
    [[0.009999999776482582], [100.0]]
    """
    span = np.float32(target.quant_max - target.quant_min)
    low, high = np.minimum(min_val, np.float32(0)), np.maximum(max_val, np.float32(0))
    if target.is_symmetric:
        scale = np.maximum(np.maximum(-low, high) / (span / np.float32(2)), np.float32(eps))
        zero_point = np.full(low.shape, target.symmetric_zero_point)
    else:
        with np.errstate(over="ignore"):
            scale = np.maximum((high - low) / span, np.float32(eps))
        if bool((scale >= _LARGE).any()):
            scale = np.where(scale < _LARGE, scale, high / span - low / span)
        zero_point = target.quant_min - np.rint(low / scale)
        zero_point = np.minimum(np.maximum(zero_point, target.quant_min), target.quant_max)
    if bool((scale >= _LARGE).any()):
        reach = np.maximum(zero_point - target.quant_min, target.quant_max - zero_point)
        reach = reach.astype(np.float32)
        limit = np.finfo(np.float32).max / reach
        with np.errstate(over="ignore"):
            limit = np.where(np.isfinite(limit * reach), limit, np.nextafter(limit, np.float32(0)))
        scale = np.where(scale < _LARGE, scale, np.minimum(scale, limit))
    return scale, zero_point
