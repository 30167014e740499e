"""Weights in groups or blocks as a node: ``torch.ops.backquant.dequantize_blocks``.

    x = (q - zero_point) * scale      scale and zero point: one for each block of a grid over the tensor

The operators of ``quantized_decomposed`` know groups along the last axis of a matrix only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backquant.dtypes import block_of, dequantize_tensor

_LIBRARY: list[torch.library.Library] = []


def dequantize_blocks(input: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """The floats that ``input`` stands for, of its shape; ``scale`` and ``zero_point`` in that of the grid.

    >>> scale = torch.tensor([[0.5, 2.0]])
    >>> dequantize_blocks(torch.tensor([[1, 2, 3, 4]], dtype=torch.int8), scale, torch.zeros(1, 2))
    tensor([[0.5000, 1.0000, 6.0000, 8.0000]])
    """
    return dequantize_tensor(input, scale, zero_point, block=block_of(input.shape, scale.shape))


def register_blocks() -> None:
    """Make the operator callable as ``torch.ops.backquant.dequantize_blocks``; twice does nothing.

    >>> register_blocks()
    >>> q, one = torch.ones(1, 2, dtype=torch.int8), torch.ones(1, 1)
    >>> torch.ops.backquant.dequantize_blocks(q, one, one)
    tensor([[0., 0.]])
    """
    if _LIBRARY:
        return
    library = torch.library.Library("backquant", "FRAGMENT")
    library.define("dequantize_blocks(Tensor input, Tensor scale, Tensor zero_point) -> Tensor")
    library.impl("dequantize_blocks", dequantize_blocks, "CompositeExplicitAutograd")
    _LIBRARY.append(library)
