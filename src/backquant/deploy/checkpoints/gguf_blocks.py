"""GGUF's blocks of 32 weights, each with its scale (float16) before its values.

| type | block | weight |
| --- | --- | --- |
| Q8_0 | scale, 32 × int8 | ``scale · q`` |
| Q4_0 | scale, 32 × 4 bits | ``scale · (q - 8)`` |
| Q4_1 | scale, minimum, 32 × 4 bits | ``scale · q + minimum`` |

Of 4-bit values the first 16 lie in the low halves of 16 bytes, the other 16 in the high ones. Larger
groups are
several blocks with one scale. A minimum is ``-zero_point · scale`` in float16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backquant.deploy.checkpoints.layer import Layer, Scheme
from backquant.deploy.checkpoints.one_scheme import half

BLOCK = 32
#: By the dtype of the weights: the name of the type, and its bytes for 32 weights.
TYPES = {"int8": ("Q8_0", 34), "int4": ("Q4_0", 18), "uint4": ("Q4_1", 20)}


def block_bytes(scheme: Scheme, rows: int, columns: int) -> tuple[int, int]:
    """The shape of the bytes of a weight.

    >>> block_bytes(Scheme("int4", 64), 8, 128)
    (8, 72)
    """
    return rows, columns // BLOCK * TYPES[scheme.dtype][1]


def blocks_of(layer: Layer) -> Tensor:
    """The bytes of a layer, row by row. Raises ``ExportError`` for scales that are no float16.

    >>> layer = Layer("fc", "int8", torch.ones(1, 32, dtype=torch.int8), torch.full((1, 1), 0.5))
    >>> blocks_of(layer)[0, :4]
    tensor([ 0, 56,  1,  1], dtype=torch.uint8)
    """
    rows, columns = layer.values.shape
    count = columns // BLOCK
    repeats = count // layer.scale.shape[1]
    scale = half(layer).repeat_interleave(repeats, 1).reshape(rows, count, 1)
    parts = [scale]
    values, zero = layer.unsigned()
    if layer.zero_point is not None:
        minimum = -zero.double() * layer.scale.double()
        parts.append(minimum.half().repeat_interleave(repeats, 1).reshape(rows, count, 1))
    if layer.dtype == "int8":
        packed = layer.values.reshape(rows, count, BLOCK).view(torch.uint8)
    else:
        low, high = values.to(torch.uint8).reshape(rows, count, 2, BLOCK // 2).unbind(2)
        packed = low | (high << 4)
    heads = [part.contiguous().view(torch.uint8) for part in parts]
    return torch.cat([*heads, packed], -1).reshape(rows, -1)
