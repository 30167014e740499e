"""Arithmetic of quantization parameters: ranges of dtypes, and scale and zero point of a range."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backquant.errors import ConfigError
from backquant.observe.protocol import is_placeholder

__all__ = [
    "QuantRange",
    "affine_qparams",
    "array_qparams",
    "is_per_channel",
    "is_per_tensor",
    "is_symmetric",
    "qparam_dict",
    "quantize_bounds",
    "resolve_range",
    "storage_dtype",
]

_STORAGE: dict[torch.dtype, torch.dtype] = {
    torch.quint8: torch.uint8,
    torch.qint8: torch.int8,
    torch.qint32: torch.int32,
    torch.quint4x2: torch.uint8,
    torch.quint2x4: torch.uint8,
    torch.uint8: torch.uint8,
    torch.int8: torch.int8,
    torch.uint16: torch.uint16,
    torch.int16: torch.int16,
    torch.int32: torch.int32,
    torch.float8_e5m2: torch.float8_e5m2,
    torch.float8_e4m3fn: torch.float8_e4m3fn,
}

_BOUNDS: dict[torch.dtype, tuple[int, int]] = {
    torch.qint8: (-128, 127),
    torch.int8: (-128, 127),
    torch.quint8: (0, 255),
    torch.uint8: (0, 255),
    torch.qint32: (-(2**31), 2**31 - 1),
    torch.int32: (-(2**31), 2**31 - 1),
    torch.int16: (-(2**15), 2**15 - 1),
    torch.uint16: (0, 2**16 - 1),
}
_EIGHT_BITS = frozenset({torch.qint8, torch.int8, torch.quint8, torch.uint8})
_FOUR_BITS = (0, 15)  # quint4x2, and what PyTorch's observers give to float8, too

_PER_TENSOR = frozenset({torch.per_tensor_affine, torch.per_tensor_symmetric})
_PER_CHANNEL = frozenset(
    {
        torch.per_channel_affine,
        torch.per_channel_symmetric,
        torch.per_channel_affine_float_qparams,
    }
)
_SYMMETRIC = frozenset({torch.per_tensor_symmetric, torch.per_channel_symmetric})


@dataclass(frozen=True)
class QuantRange:
    """The integer range that a tensor is quantized to, and by which scheme.

    ``customized`` is true when the user gave both bounds.
    """

    dtype: torch.dtype
    qscheme: torch.qscheme
    quant_min: int
    quant_max: int
    customized: bool = False


def is_per_tensor(qscheme: Any) -> bool:
    """Whether one scale serves the whole tensor.

    >>> is_per_tensor(torch.per_tensor_symmetric)
    True
    """
    return qscheme in _PER_TENSOR


def is_per_channel(qscheme: Any) -> bool:
    """Whether every channel has its own scale.

    >>> is_per_channel(torch.per_tensor_symmetric)
    False
    """
    return qscheme in _PER_CHANNEL


def is_symmetric(qscheme: Any) -> bool:
    """Whether the zero point is fixed at the middle of the range.

    >>> is_symmetric(torch.per_channel_symmetric)
    True
    """
    return qscheme in _SYMMETRIC


def storage_dtype(token: torch.dtype) -> torch.dtype:
    """The plain dtype in which values of a quantized dtype are stored.

    Raises ConfigError for a dtype that is not a quantized one.

    >>> storage_dtype(torch.quint8), storage_dtype(torch.quint4x2)
    (torch.uint8, torch.uint8)
    """
    if token not in _STORAGE:
        raise ConfigError(
            f"{token} has no quantized storage",
            where="storage_dtype",
            fix="use one of " + ", ".join(str(dtype) for dtype in _STORAGE),
        )
    return _STORAGE[token]


def quantize_bounds(dtype: torch.dtype, reduce_range: bool = False) -> tuple[int, int]:
    """Smallest and largest integer of a quantized dtype.

    ``reduce_range`` drops one bit of the 8-bit dtypes (the others have no reduced form).
    Like PyTorch's observers, four-bit and float8 dtypes give 0 to 15.

    >>> quantize_bounds(torch.qint8), quantize_bounds(torch.quint8, reduce_range=True)
    ((-128, 127), (0, 127))
    """
    low, high = _BOUNDS.get(dtype, _FOUR_BITS)
    if reduce_range and dtype in _EIGHT_BITS:
        return low // 2, high // 2
    return low, high


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
    low, high = _BOUNDS.get(dtype, _FOUR_BITS)
    fix = f"use bounds within quant_min={low}, quant_max={high}"
    if quant_min >= quant_max:
        raise ConfigError("quant_min must be less than quant_max", where=where, fix=fix)
    if not quant_min <= 0 <= quant_max:
        raise ConfigError("the quantization range must include 0", where=where, fix=fix)
    limit = {1: 2**8, 4: 2**32}.get(dtype.itemsize) if dtype in _SIGNED else None
    if limit is not None and quant_max - quant_min + 1 > limit:
        raise ConfigError(
            f"the quantization range has more than {limit} values", where=where, fix=fix
        )
    if reduce_range:
        return quant_min // 2, quant_max // 2
    return quant_min, quant_max


# The dtypes whose width PyTorch checks a custom range against.
_SIGNED = frozenset({torch.qint8, torch.int8, torch.qint32, torch.int32})


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

    >>> target = QuantRange(torch.quint8, torch.per_tensor_affine, 0, 255)
    >>> affine_qparams(torch.tensor(-1.0), torch.tensor(1.55), target, torch.tensor([1e-7]))
    (tensor([0.0100]), tensor([100], dtype=torch.int32))
    """
    span = float(target.quant_max - target.quant_min)
    zero = torch.zeros_like(min_val)
    low, high = torch.minimum(min_val, zero), torch.maximum(max_val, zero)
    if is_symmetric(target.qscheme):  # case 1
        scale = torch.maximum(torch.maximum(-low, high) / (span / 2), eps)
        zero_point = torch.full_like(low, _symmetric_zero_point(target), dtype=torch.int64)
    elif target.qscheme == torch.per_channel_affine_float_qparams:  # case 2
        scale = (max_val - min_val) / span
        scale = torch.where(scale > eps, scale, torch.ones_like(scale))
        zero_point = -1 * min_val / scale
    else:  # case 3
        scale = torch.maximum((high - low) / span, eps)
        zero_point = target.quant_min - torch.round(low / scale).to(torch.int32)
        zero_point = torch.clamp(zero_point, target.quant_min, target.quant_max)
    return torch.atleast_1d(scale), torch.atleast_1d(zero_point)


def array_qparams(
    min_val: np.ndarray[Any, Any], max_val: np.ndarray[Any, Any], target: QuantRange, eps: float
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """``affine_qparams`` on arrays (float32 ``[n]``), for the schemes per tensor; the same bits.

    >>> target = QuantRange(torch.quint8, torch.per_tensor_affine, 0, 255)
    >>> low, high = np.array([-1.0], np.float32), np.array([1.55], np.float32)
    >>> [part.tolist() for part in array_qparams(low, high, target, 1e-7)]
    [[0.009999999776482582], [100.0]]
    """
    span = np.float32(target.quant_max - target.quant_min)
    low, high = np.minimum(min_val, np.float32(0)), np.maximum(max_val, np.float32(0))
    if is_symmetric(target.qscheme):
        scale = np.maximum(np.maximum(-low, high) / (span / np.float32(2)), np.float32(eps))
        return scale, np.full(low.shape, _symmetric_zero_point(target))
    scale = np.maximum((high - low) / span, np.float32(eps))
    zero_point = target.quant_min - np.rint(low / scale)
    return scale, np.minimum(np.maximum(zero_point, target.quant_min), target.quant_max)


def _symmetric_zero_point(target: QuantRange) -> int:
    if target.dtype in (torch.quint8, torch.uint8):
        return (target.quant_min + target.quant_max) // 2 if target.customized else 128
    return 2**15 if target.dtype == torch.uint16 else 0


def qparam_dict(observer: Any, calculated: tuple[Tensor, Tensor] | None = None) -> dict[str, Any]:
    """What a reference module needs of the observer of its weight.

    ``calculated``: what its ``calculate_qparams()`` would return, if that is known.

    Keys: ``qscheme`` (affine; None when the observer has none or measures nothing), ``dtype``,
    and then ``scale``, ``zero_point``, ``axis`` (per channel), ``quant_min``, ``quant_max``.

    >>> from backquant.observe import default_weight_observer
    >>> observer = default_weight_observer()
    >>> _ = observer(torch.tensor([-1.0, 1.275]))
    >>> sorted(qparam_dict(observer))
    ['dtype', 'qscheme', 'quant_max', 'quant_min', 'scale', 'zero_point']
    """
    qscheme = getattr(observer, "qscheme", None)
    if qscheme is None or is_placeholder(observer):
        return {"qscheme": None, "dtype": observer.dtype}
    result: dict[str, Any] = {"dtype": observer.dtype}
    if is_per_tensor(qscheme):
        result["qscheme"] = torch.per_tensor_affine
    else:
        symmetric = qscheme == torch.per_channel_symmetric
        result["qscheme"] = torch.per_channel_affine if symmetric else qscheme
        result["axis"] = observer.ch_axis
    pair = observer.calculate_qparams() if calculated is None else calculated
    result["scale"], result["zero_point"] = pair
    for bound in ("quant_min", "quant_max"):
        if hasattr(observer, bound):
            result[bound] = getattr(observer, bound)
    return result
