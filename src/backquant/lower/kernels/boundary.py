"""Kernels between float and integer parts of a model: quantize, dequantize, requantize, saturate; and
conversion from and to the quantized tensors of custom modules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from backquant.dtypes import tensor_token
from backquant.errors import InputError
from backquant.lower.kernels.prepared import is_plain
from backquant.lower.kernels.views import as_quantized, integer_view
from backquant.native.library import is_here

_FAR = 2.0**30  # in steps: outside any range, and plus any zero point still within 32 bits


def quantize(
    x: torch.Tensor,
    scale: float,
    zero_point: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Float ``x`` of any shape to integers of ``dtype``, by the library of kernels where it is here and takes
    them (``steps``), else by ``aten::quantize_per_tensor``.

    Equal to ``quantized_decomposed::quantize_per_tensor``, but for values exactly between two
    integers: PyTorch's before 2.15 rounds them the other way with an odd zero point, as in every model
    that torch's own lowering makes. NaN has no defined result. As there, float16 and bfloat16 are
    taken, and any other dtype is refused: ``InputError``.

    >>> quantize(torch.tensor([-9.0, 0.0, 0.5, 99.0]), 0.5, 10, 0, 127, torch.uint8)
    tensor([  0,  10,  11, 127], dtype=torch.uint8)
    """
    if x.dtype != torch.float32:
        x = _as_float32(x)
    if dtype == torch.uint8 and (quant_min, quant_max) == (0, 255):
        found = quantized(x, scale, zero_point)
        if found is not None:
            return found
    if zero_point < 0 and _wraps():
        x = x.clamp(min=-_FAR * scale)
    q = integer_view(torch.quantize_per_tensor(x, scale, zero_point, tensor_token(dtype)))
    info = torch.iinfo(dtype)
    if quant_min > info.min or quant_max < info.max:
        q.clamp_(quant_min, quant_max)
    return q


@cache
def _wraps() -> bool:
    """Whether values far below the range, as of masks, become the highest integer where the zero point is
    below 0: in PyTorch 2.15."""
    q = torch.quantize_per_tensor(torch.tensor([-torch.inf]), 1.0, -1, tensor_token(torch.int8))
    return bool(integer_view(q) > 0)


def _as_float32(x: torch.Tensor) -> torch.Tensor:
    if x.dtype not in (torch.float16, torch.bfloat16):
        dtype = str(x.dtype).removeprefix("torch.")
        raise InputError(
            f"{dtype} values where the model quantizes float32",
            where=f"{dtype}{list(x.shape)}",
            fix="model(x.float())",
        )
    return x.float()


def dequantize(
    x: torch.Tensor,
    scale: float,
    zero_point: int,
    quant_min: int,  # noqa: ARG001 - not needed, but part of the operator
    quant_max: int,  # noqa: ARG001
    dtype: torch.dtype,  # noqa: ARG001
) -> torch.Tensor:
    """Integers of any shape to float32, equal to ``quantized_decomposed::dequantize_per_tensor``.

    >>> dequantize(torch.tensor([8, 10], dtype=torch.uint8), 0.5, 10, 0, 255, torch.uint8)
    tensor([-1.,  0.])
    """
    return as_quantized(x, scale, zero_point).dequantize()


def requantize(
    x: torch.Tensor,
    scale: float,
    zero_point: int,
    out_scale: float,
    out_zero_point: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Integers under one set of qparams to integers under another.

    >>> requantize(torch.tensor([10, 14], dtype=torch.uint8), 0.5, 10, 1.0, 0, 0, 255, torch.uint8)
    tensor([0, 2], dtype=torch.uint8)
    """
    value = as_quantized(x, scale, zero_point).dequantize()
    return quantize(value, out_scale, out_zero_point, quant_min, quant_max, dtype)


def cat(
    parts: Sequence[torch.Tensor],
    scales: Sequence[float],
    zero_points: Sequence[int],
    fits: Sequence[bool],
    dim: int,
    out_scale: float,
    out_zero_point: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``parts`` along ``dim``, those that do not have the result's qparams (``fits``) requantized.

    >>> x = torch.tensor([10, 14], dtype=torch.uint8)
    >>> cat([x, x], [0.5, 1.0], [10, 0], [False, True], 0, 1.0, 0, 0, 255, torch.uint8)
    tensor([ 0,  2, 10, 14], dtype=torch.uint8)
    """
    out = (out_scale, out_zero_point, quant_min, quant_max, dtype)
    return torch.cat(
        [
            x if fit else requantize(x, scale, zero_point, *out)
            for x, scale, zero_point, fit in zip(parts, scales, zero_points, fits, strict=True)
        ],
        dim,
    )


def saturate(x: torch.Tensor, quant_min: int, quant_max: int) -> torch.Tensor:
    """Clamp integers in place; only inserted after a kernel that made ``x`` for this one reader.

    >>> saturate(torch.tensor([3, 200], dtype=torch.uint8), 0, 127)
    tensor([  3, 127], dtype=torch.uint8)
    """
    return x.clamp_(quant_min, quant_max)


def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x`` multiplied by ``y`` in place; only inserted after a kernel that made ``x`` for this one reader.

    >>> multiply(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 0.5]))
    tensor([2., 1.])
    """
    return x.mul_(y)


def quantized_tensor(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """Integers as a quantized tensor of its own, for a custom module.

    >>> quantized_tensor(torch.tensor([10, 12], dtype=torch.uint8), 0.5, 10).dequantize()
    tensor([0., 1.])
    """
    return torch._make_per_tensor_quantized_tensor(x, scale, zero_point)


def integers_of(
    q: torch.Tensor,
    scale: float,
    zero_point: int,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The integers of a quantized tensor that a custom module gave, or, of other qparams, of its values.

    >>> q = torch.quantize_per_tensor(torch.ones(2), 0.5, 10, torch.quint8)
    >>> integers_of(q, 0.5, 10, 0, 255, torch.uint8), integers_of(q, 0.25, 0, 0, 255, torch.uint8)
    (tensor([12, 12], dtype=torch.uint8), tensor([4, 4], dtype=torch.uint8))
    """
    is_same = (
        q.is_quantized and q.qscheme() == torch.per_tensor_affine and q.dtype == tensor_token(dtype)
    )
    if not is_same or (q.q_scale(), q.q_zero_point()) != (scale, zero_point):
        value = q.dequantize() if q.is_quantized else q
        return quantize(value, scale, zero_point, quant_min, quant_max, dtype)
    return integer_view(q).clamp(quant_min, quant_max)


# Floats to 8-bit integers, and these to others by a table, by the library of kernels (``backquant.native``),
# where it is here.
#
# Floats become a whole number of steps, then comes the zero point: the integers of the reference model, also
# halfway between two.


def quantized(x: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor | None:
    """float32 ``x`` as uint8 in the same memory format; None for what the library does not compute.

    >>> quantized(torch.ones(2, dtype=torch.float64), 0.5, 0) is None
    True
    """
    if x.dtype != torch.float32 or not is_plain(x) or not _is_dense(x) or not is_here():
        return None
    return torch.ops.backquant_kernels.quantized.default(x, scale, zero_point)  # type: ignore[no-any-return]


def looked_up(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor | None:
    """The entry of ``table`` (uint8, 256 of them) for each integer of ``x`` (uint8), in its memory format;
    None for what the library does not compute.

    >>> looked_up(torch.ones(2), torch.zeros(256, dtype=torch.uint8)) is None  # floats
    True
    """
    if not (x.dtype == table.dtype == torch.uint8) or not is_plain(x) or not _is_dense(x):
        return None
    return torch.ops.backquant_kernels.looked_up.default(x, table) if is_here() else None


def _is_dense(x: torch.Tensor) -> bool:
    if x.is_contiguous():
        return True
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
