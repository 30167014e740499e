"""Integer arithmetic of weights on plain tensors.

The rounding is that of PyTorch's CPU kernels, so that the integers and the dequantized floats are
equal bit for bit to those of ``torch.quantize_per_tensor`` and ``torch.quantize_per_channel``:

1. quantization:    ``q = clamp(round_half_even(w * (1 / scale) + zero_point))``
2. dequantization:  ``(q - zero_point) * scale``

Rule 1 adds the zero point before the rounding: with an odd one, ties go the other way than if it
were added afterwards. With ``per_channel_affine_float_qparams`` it is a float. FBGEMM's code for
one 8-bit scale fuses the multiplication and the addition, so that they are rounded to float32 once
(about one weight in a million is a tie because of it); the other kernels round twice.
All products are float32 otherwise. Weights in 8-bit floats are rounded by ``clamp(w / scale)`` and a
cast (rule 3). No quantized tensor is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from backquant.dtypes import is_per_channel, is_per_tensor, quantize_bounds, storage_dtype
from backquant.errors import ConfigError

__all__ = ["WeightQParams", "dequantize_weight", "quantize_weight"]

_INTEGER = (
    torch.qint8,
    torch.int8,
    torch.quint8,
    torch.uint8,
    torch.quint4x2,
    torch.int16,
    torch.qint32,
    torch.int32,
)
# 8-bit floats: a scale, no zero point; rule 3
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_FLOAT_STORAGE = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class WeightQParams:
    """How one weight is quantized.

    ``qscheme`` is ``None`` for a weight that stays floating point, in which case ``dtype`` is
    float32, float16 or bfloat16 and the rest is ignored. Otherwise ``scale`` is float32 and
    ``zero_point`` int64 (float32 for ``per_channel_affine_float_qparams``); both have no dimension,
    or one entry per slice along ``axis``. ``quant_min`` and ``quant_max`` bound the integers.
    """

    qscheme: torch.qscheme | None
    dtype: torch.dtype
    scale: torch.Tensor
    zero_point: torch.Tensor
    axis: int
    quant_min: int
    quant_max: int

    @classmethod
    def from_dict(
        cls, qparams: Mapping[str, Any], device: torch.device | str | None = None
    ) -> WeightQParams:
        """Read PyTorch's dict: ``qscheme``, ``dtype``, ``scale``, ``zero_point``, ``axis`` (per
        channel), ``quant_min`` and ``quant_max`` (both optional, then the dtype's own).

        Raises ``ConfigError`` on a dtype or qscheme that no weight can have, on a missing key, on
        bounds outside of the dtype's.

        >>> q = WeightQParams.from_dict({"qscheme": torch.per_tensor_affine, "scale": 0.5,
        ...                              "zero_point": 0, "dtype": torch.qint8, "quant_min": -127})
        >>> q.quant_min, q.quant_max, q.storage
        (-127, 127, torch.int8)
        """
        qscheme, dtype = qparams.get("qscheme"), qparams.get("dtype")
        if qscheme is None:
            if dtype not in _FLOAT_STORAGE:
                raise _unknown_dtype(dtype, "a weight without a qscheme stays floating point")
            one, zero = torch.ones((), device=device), torch.zeros((), device=device)
            return cls(None, dtype, one, zero.long(), 0, 0, 0)
        if dtype in _FLOAT8 and not is_per_tensor(qscheme):
            raise _unknown_dtype(dtype, f"a weight in 8-bit floats has one scale, not {qscheme}")
        if dtype not in (*_INTEGER, *_FLOAT8):
            raise _unknown_dtype(dtype, f"a weight with {qscheme} is stored as integers")
        if not (is_per_tensor(qscheme) or is_per_channel(qscheme)):
            raise ConfigError(
                f"{qscheme} is not a scheme for weights",
                where="weight_qparams['qscheme']",
                fix="use torch.per_tensor_affine, torch.per_channel_affine, their symmetric forms, "
                "or torch.per_channel_affine_float_qparams",
            )
        scale, zero_point, axis = _read_scale(qparams, qscheme, device)
        quant_min, quant_max = _read_bounds(qparams, dtype)
        return cls(qscheme, dtype, scale, zero_point, axis, quant_min, quant_max)

    @property
    def storage(self) -> torch.dtype:
        """The plain dtype that the weight is stored in."""
        return self.dtype if self.qscheme is None else storage_dtype(self.dtype)

    @property
    def per_channel(self) -> bool:
        """Whether there is one scale per slice along ``axis``."""
        return is_per_channel(self.qscheme)


def _unknown_dtype(dtype: object, why: str) -> ConfigError:
    return ConfigError(
        f"{dtype} is not a dtype for weights here: {why}",
        where="weight_qparams['dtype']",
        fix="torch.qint8, torch.quint8, torch.quint4x2 or torch.qint32 with a qscheme; "
        "torch.float16, torch.bfloat16 or torch.float32 with qscheme None",
    )


def _required(qparams: Mapping[str, Any], key: str) -> Any:
    if qparams.get(key) is None:
        raise ConfigError(
            f"weight_qparams has no {key!r}",
            where=f"weight_qparams with keys {sorted(qparams)}",
            fix=f"weight_qparams[{key!r}] = ...  # as the weight's observer calculated it",
        )
    return qparams[key]


def _positive_and_finite(scale: torch.Tensor) -> bool:
    if not scale.numel():
        return True
    low, high = scale.aminmax()  # both are NaN where any is
    return low.item() > 0 and high.item() < math.inf


def _read_scale(
    qparams: Mapping[str, Any], qscheme: torch.qscheme, device: torch.device | str | None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    zero_dtype = torch.float32 if qscheme == torch.per_channel_affine_float_qparams else torch.int64
    scale = torch.as_tensor(_required(qparams, "scale"), dtype=torch.float32, device=device)
    zero_point = torch.as_tensor(_required(qparams, "zero_point"), dtype=zero_dtype, device=device)
    if not scale.is_meta and not _positive_and_finite(scale):
        raise ConfigError(
            "scales must be positive and finite",
            where=f"weight_qparams['scale'], smallest {scale.min().item()}",
            fix="observe a weight without NaN or infinity, with an observer whose eps is above 0",
        )
    if is_per_tensor(qscheme):
        if scale.numel() != 1 or zero_point.numel() != 1:
            raise ConfigError(
                f"{qscheme} has one scale, got {scale.numel()}",
                where="weight_qparams['scale']",
                fix="use torch.per_channel_affine with an 'axis', or one scale",
            )
        return scale.detach().reshape(()).clone(), zero_point.detach().reshape(()).clone(), 0
    axis = _required(qparams, "axis")
    if scale.dim() != 1 or scale.shape != zero_point.shape:
        raise ConfigError(
            f"{qscheme} has one scale and one zero point per channel, got shapes "
            f"{tuple(scale.shape)} and {tuple(zero_point.shape)}",
            where="weight_qparams",
            fix="pass 'scale' and 'zero_point' as 1-D tensors of weight.shape[axis] entries",
        )
    return scale.detach().clone(), zero_point.detach().clone(), int(axis)


def _read_bounds(qparams: Mapping[str, Any], dtype: torch.dtype) -> tuple[int, int]:
    low, high = quantize_bounds(dtype)
    if dtype in _FLOAT8:
        low, high = (int(bound) for bound in (torch.finfo(dtype).min, torch.finfo(dtype).max))
    quant_min, quant_max = qparams.get("quant_min"), qparams.get("quant_max")
    quant_min = low if quant_min is None else int(quant_min)
    quant_max = high if quant_max is None else int(quant_max)
    if not low <= quant_min < quant_max <= high:
        raise ConfigError(
            f"the range [{quant_min}, {quant_max}] is not within {dtype}'s [{low}, {high}]",
            where="weight_qparams['quant_min'], weight_qparams['quant_max']",
            fix=f"choose quant_min < quant_max within [{low}, {high}]",
        )
    return quant_min, quant_max


def _along_axis(values: torch.Tensor, weight: torch.Tensor, axis: int) -> torch.Tensor:
    """Reshape one entry per channel so that it broadcasts along ``axis`` of ``weight``."""
    if values.dim() == 0:
        return values
    shape = [1] * weight.dim()
    shape[axis] = -1
    return values.reshape(shape)


def _check_weight(weight: torch.Tensor, qparams: WeightQParams) -> None:
    if weight.dtype != torch.float32:
        raise ConfigError(
            f"only float32 weights can be quantized, got {weight.dtype}",
            where=f"weight of shape {tuple(weight.shape)}",
            fix="model.float()",
        )
    if not qparams.per_channel:
        return
    axis, channels = qparams.axis, qparams.scale.numel()
    if not -weight.dim() <= axis < weight.dim() or weight.shape[axis] != channels:
        raise ConfigError(
            f"{channels} scales along axis {axis} do not fit a weight of shape "
            f"{tuple(weight.shape)}",
            where="weight_qparams['axis'], weight_qparams['scale']",
            fix="observe the weight with ch_axis= the axis of its output channels "
            "(0; 1 for transposed convolutions)",
        )


def quantize_weight(weight: torch.Tensor, qparams: WeightQParams) -> torch.Tensor:
    """Rule 1: ``weight`` (float32) as a plain tensor of ``qparams.storage``, same shape and layout.

    Raises ``ConfigError`` for a weight that is not float32 and for scales that do not fit its
    shape. Weights kept in float16 saturate at its largest finite value, as FBGEMM's packing does.

    >>> qparams = WeightQParams.from_dict({
    ...     "qscheme": torch.per_channel_affine, "dtype": torch.qint8, "axis": 0,
    ...     "scale": torch.tensor([0.5, 0.25]), "zero_point": torch.tensor([0, 1])})
    >>> quantize_weight(torch.tensor([[0.75, -100.0], [0.75, 0.25]]), qparams)
    tensor([[   2, -128],
            [   4,    2]], dtype=torch.int8)
    """
    weight = weight.detach()
    if qparams.qscheme is None:
        limit = torch.finfo(qparams.dtype).max
        return weight.clamp(-limit, limit).to(qparams.dtype, copy=True)
    _check_weight(weight, qparams)
    if weight.is_meta:  # torch interprets every operator on such a tensor in Python: 100 µs each
        return torch.empty_like(weight, dtype=qparams.storage)
    if qparams.dtype in _FLOAT8:
        return (
            (weight / qparams.scale).clamp(qparams.quant_min, qparams.quant_max).to(qparams.dtype)
        )
    inverse = _along_axis(1.0 / qparams.scale, weight, qparams.axis)
    zero_point = _along_axis(qparams.zero_point, weight, qparams.axis)
    if weight.dim() == 0 or weight.numel() <= _PART:
        return _rounded(weight, (inverse, zero_point), qparams)
    quantized = torch.empty_like(weight, dtype=qparams.storage)
    rows = max(1, _PART * weight.size(0) // weight.numel())
    for start in range(0, weight.size(0), rows):
        part = slice(start, start + rows)
        by_row = inverse.dim() > 0 and inverse.size(0) > 1
        scales = (inverse[part], zero_point[part]) if by_row else (inverse, zero_point)
        quantized[part] = _rounded(weight[part], scales, qparams)
    return quantized


# Larger weights are rounded in parts, so that no float copy of them is needed.
_PART = 1 << 18


def _rounded(
    weight: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor], qparams: WeightQParams
) -> torch.Tensor:
    inverse, zero_point = scales
    if not qparams.per_channel and qparams.storage.itemsize == 1:
        # The float64 product of two float32 is exact: one rounding to float32 in all.
        rounded = (weight.double() * inverse).add_(zero_point).float().round_()
    else:
        rounded = (weight * inverse).add_(zero_point).round_()
    if qparams.storage == torch.int32:  # float32 cannot hold the bounds of int32
        rounded = rounded.double()
    return rounded.clamp_(qparams.quant_min, qparams.quant_max).to(qparams.storage)


def dequantize_weight(
    quantized: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, axis: int = 0
) -> torch.Tensor:
    """Rule 2: the floats that ``quantized`` stands for, in the dtype of ``scale``.

    ``scale`` and ``zero_point`` have no dimension, or one entry per slice along ``axis``. A
    floating point ``quantized`` is only cast.

    >>> dequantize_weight(torch.tensor([[2, -128]], dtype=torch.int8), torch.tensor(0.5),
    ...                   torch.tensor(0))
    tensor([[  1., -64.]])
    """
    if quantized.dtype in _FLOAT8:
        return quantized.to(scale.dtype) * scale
    if quantized.is_floating_point():
        return quantized.to(scale.dtype)
    compute = torch.promote_types(torch.float32, scale.dtype)
    wide_scale = _along_axis(scale.to(compute), quantized, axis)
    zero_point = _along_axis(zero_point, quantized, axis)
    if quantized.dtype == torch.int32:  # float32 cannot hold the difference
        steps = (quantized.to(zero_point.dtype) - zero_point).to(compute)
    else:
        steps = quantized.to(compute) - zero_point.to(compute)
    return (steps * wide_scale).to(scale.dtype)
