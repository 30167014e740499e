"""Weights of reference modules: their qparams, read from PyTorch's dict, and their integers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from backquant.dtypes import (
    TensorQParams,
    block_of,
    find_dtype,
    is_per_channel,
    is_per_tensor,
    is_quantized,
    quantize_bounds,
    quantize_tensor,
)
from backquant.errors import ConfigError


def weight_qparams(
    qparams: Mapping[str, Any], device: torch.device | str | None = None
) -> TensorQParams:
    """Read PyTorch's dict: ``qscheme``, ``dtype``, ``scale``, ``zero_point``, ``axis`` (per
    channel), ``quant_min`` and ``quant_max`` (both optional, then the dtype's own). Scales and zero points
    in the shape of a grid over the weight are those of groups or blocks.

    ``qscheme`` is ``None`` for a weight that stays floating point, in which case ``dtype`` is
    float32, float16 or bfloat16 and the rest is ignored. Otherwise the scale becomes float32 and the
    zero point int64 (float32 for ``per_channel_affine_float_qparams``).

    Raises ``ConfigError`` on a dtype or qscheme that no weight can have, on a missing key, on
    bounds outside of the dtype's.

    >>> q = weight_qparams({"qscheme": torch.per_tensor_affine, "scale": 0.5,
    ...                     "zero_point": 0, "dtype": torch.qint8, "quant_min": -127})
    >>> q.quant_min, q.quant_max, q.storage
    (-127, 127, torch.int8)
    """
    qscheme, dtype = qparams.get("qscheme"), qparams.get("dtype")
    row = find_dtype(dtype)
    if qscheme is None:
        if row is None or row.has_scale:
            raise _unknown_dtype(dtype, "a weight without a qscheme stays floating point")
        one, zero = torch.ones((), device=device), torch.zeros((), device=device)
        return TensorQParams(one, zero.long(), 0, 0, row.token)
    if row is None or not row.has_scale:
        raise _unknown_dtype(dtype, f"a weight with {qscheme} is stored as integers")
    if not (is_per_tensor(qscheme) or is_per_channel(qscheme)):
        raise ConfigError(
            f"{qscheme} is not a scheme for weights",
            where="weight_qparams['qscheme']",
            fix="use torch.per_tensor_affine, torch.per_channel_affine, their symmetric forms, "
            "or torch.per_channel_affine_float_qparams",
        )
    scale, zero_point, axis = _read_scale(qparams, qscheme, device)
    bounds = _read_bounds(qparams, row.token)
    return TensorQParams(scale, zero_point, *bounds, row.token, axis, qscheme=qscheme)


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
) -> tuple[torch.Tensor, torch.Tensor, int | None]:
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
        return scale.detach().reshape(()).clone(), zero_point.detach().reshape(()).clone(), None
    if scale.dim() > 1:  # a grid of blocks
        zero_point = torch.as_tensor(qparams["zero_point"], device=device)
        if scale.shape == zero_point.shape:
            return scale.detach().clone(), zero_point.detach().clone(), None
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


def _check_weight(weight: torch.Tensor, qparams: TensorQParams) -> None:
    if weight.dtype != torch.float32:
        raise ConfigError(
            f"only float32 weights can be quantized, got {weight.dtype}",
            where=f"weight of shape {tuple(weight.shape)}",
            fix="model.float()",
        )
    if qparams.axis is None:
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


def quantize_weight(weight: torch.Tensor, qparams: TensorQParams) -> torch.Tensor:
    """``weight`` (float32) as a plain tensor of ``qparams.storage``, same shape and layout.

    Raises ``ConfigError`` for a weight that is not float32 and for scales that do not fit its
    shape. Weights kept in float16 saturate at its largest finite value, as FBGEMM's packing does.

    >>> qparams = weight_qparams({
    ...     "qscheme": torch.per_channel_affine, "dtype": torch.qint8, "axis": 0,
    ...     "scale": torch.tensor([0.5, 0.25]), "zero_point": torch.tensor([0, 1])})
    >>> quantize_weight(torch.tensor([[0.75, -100.0], [0.75, 0.25]]), qparams)
    tensor([[   2, -128],
            [   4,    2]], dtype=torch.int8)
    """
    weight = weight.detach()
    if is_quantized(qparams.dtype):
        _check_weight(weight, qparams)
    if qparams.scale.dim() > 1:
        qparams = replace(qparams, block=block_of(weight.shape, qparams.scale.shape))
    return quantize_tensor(weight, qparams)
