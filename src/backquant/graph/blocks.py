"""Groups and blocks as nodes: ``torch.ops.backquant.quantize_blocks`` and ``dequantize_blocks``.

    q, scale, 0 = quantize_blocks(x)  at each call: the largest magnitude of each block becomes the dtype's
                                      largest value, or is what the dtype of the scales makes of that
    x = (q - zero_point) * scale      scale and zero point: one for each block of a grid over the tensor

The operators of ``quantized_decomposed`` know groups along the last axis of a matrix only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backquant.dtypes import (
    Granularity,
    QParams,
    block_of,
    dequantize_tensor,
    quantize_tensor,
    stored_scale,
)
from backquant.errors import InputError

_LIBRARY: list[torch.library.Library] = []


def quantize_blocks(
    input: Tensor,
    granularity: str,
    quant_min: int,
    quant_max: int,
    eps: float,
    dtype: torch.dtype,
    scale_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``input`` (float32) in the storage of ``dtype``, with the scales and zero points (0) of its blocks.

    Raises InputError where the blocks do not divide ``input``.

    >>> x = torch.tensor([[1.0, -6.0, 3.0, 0.5]])
    >>> q, scale, _ = quantize_blocks(x, "per_group(size=2)", -6, 6, 1e-9, torch.float4_e2m1fn_x2)
    >>> q.float().tolist(), scale.tolist()
    ([[1.0, -6.0, 6.0, 1.0]], [[1.0, 0.5]])
    """
    shared = Granularity.parse(granularity)
    wrong = shared.undivided(input.shape)
    if wrong is not None:
        raise InputError(
            f"blocks of {wrong.size} do not divide axis {wrong.axis} of {list(input.shape)}",
            where=f"activations quantized {shared.words}",
            fix=f"sizes that are a multiple of {wrong.size}",
        )
    block = shared.block(input.shape)
    sides = [side for n, b in zip(input.shape, block, strict=True) for side in (n // b, b)]
    inner = tuple(range(1, 2 * input.dim(), 2))
    largest = input.detach().abs().reshape(sides).amax(inner).double()
    scale = stored_scale((largest / quant_max).clamp(min=eps), scale_dtype, quant_max).float()
    zero_point = torch.zeros_like(scale, dtype=torch.int32)
    ends = (quant_min, quant_max)
    found = QParams(scale, zero_point, *ends, dtype, block=block)
    return quantize_tensor(input, found), scale, zero_point


def dequantize_blocks(input: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """The floats that ``input`` stands for, of its shape; ``scale`` and ``zero_point`` in that of the grid.

    >>> scale = torch.tensor([[0.5, 2.0]])
    >>> dequantize_blocks(torch.tensor([[1, 2, 3, 4]], dtype=torch.int8), scale, torch.zeros(1, 2))
    tensor([[0.5000, 1.0000, 6.0000, 8.0000]])
    """
    return dequantize_tensor(input, scale, zero_point, block=block_of(input.shape, scale.shape))


def register_blocks() -> None:
    """Make the operators callable as ``torch.ops.backquant.*``; twice does nothing.

    >>> register_blocks()
    >>> q, one = torch.ones(1, 2, dtype=torch.int8), torch.ones(1, 1)
    >>> torch.ops.backquant.dequantize_blocks(q, one, one)
    tensor([[0., 0.]])
    """
    if _LIBRARY:
        return
    library = torch.library.Library("backquant", "FRAGMENT")
    library.define("dequantize_blocks(Tensor input, Tensor scale, Tensor zero_point) -> Tensor")
    library.define(
        "quantize_blocks(Tensor input, str granularity, int quant_min, int quant_max, float eps, "
        "ScalarType dtype, ScalarType? scale_dtype=None) -> (Tensor, Tensor, Tensor)"
    )
    for operator in (quantize_blocks, dequantize_blocks):
        library.impl(operator.__name__, operator, "CompositeExplicitAutograd")
    _LIBRARY.append(library)
