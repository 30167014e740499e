"""GGUF's blocks: weights in fixed numbers, with their scales beside them.

| type | block | weight |
| --- | --- | --- |
| Q8_0 | scale, 32 × int8 | ``scale · q`` |
| Q4_0, Q5_0 | scale, 32 × 4 or 5 bits | ``scale · (q - 8)``, ``scale · (q - 16)`` |
| Q4_1, Q5_1 | scale, minimum, 32 × 4 or 5 bits | ``scale · q + minimum`` |
| Q2_K, Q4_K, Q5_K | 256, scales and minima of groups of 16 or 32 | ``scale · q + minimum`` |
| Q3_K, Q6_K | 256, scales of groups of 16 | ``scale · (q - 4)``, ``scale · (q - 32)`` |

Scales and minima of the first kinds are float16; of blocks of 256 integers times one float16, products that
float32 holds exactly. Bits lie in planes: the lowest of the first bytes, then the next ones of the same
bytes. Weights of 5 and 6 bits are read as 8 bits. Larger groups are written as several blocks with one scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backquant.deploy.checkpoints.layer import Layer, Scheme, is_exact
from backquant.deploy.checkpoints.one_scheme import half, minima
from backquant.errors import ExportError

BLOCK = 32
#: By the dtype of the weights that are written: the name of the type, and its bytes for 32 weights.
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
    parts = [half(layer)]
    if not layer.scheme.symmetric:
        parts.append(_half_minima(layer))
    if layer.dtype == "int8":
        packed = layer.values.reshape(rows, count, BLOCK).view(torch.uint8)
    else:
        raised = layer.values.to(torch.int16) + layer.offset
        low, high = raised.to(torch.uint8).reshape(rows, count, 2, BLOCK // 2).unbind(2)
        packed = low | (high << 4)
    heads = [part.repeat_interleave(repeats, 1).reshape(rows, count, 1) for part in parts]
    stored = [head.contiguous().view(torch.uint8) for head in heads]
    return torch.cat([*stored, packed], -1).reshape(rows, -1)


def _half_minima(layer: Layer) -> Tensor:
    if layer.minimum is not None and not is_exact(layer.minimum, torch.float16):
        raise ExportError(
            f"the minima of {layer.path} are no float16, which the format stores",
            where=layer.path,
            fix=f'options={{"ignore": [{layer.path!r}]}}   # in float, or a format that stores minima',
        )
    return minima(layer).to(torch.float16)


#: Where bits of values lie: the first byte and the one behind the last, the bytes of a plane, bits in each.
Bits = tuple[int, int, int, int]


def _planes(stored: Tensor, where: Bits) -> Tensor:
    """Values of some bits from the planes of bytes.

    >>> _planes(torch.tensor([[0x21, 0x43]], dtype=torch.uint8), (0, 2, 2, 4))
    tensor([[1, 3, 2, 4]], dtype=torch.uint8)
    """
    start, end, width, bits = where
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).reshape(1, 1, -1, 1)
    spread = stored[:, start:end].reshape(len(stored), -1, 1, width) >> shifts
    return (spread & ((1 << bits) - 1)).reshape(len(stored), -1)


def _half(stored: Tensor, place: int) -> Tensor:
    return stored[:, place : place + 2].contiguous().view(torch.float16).float()


def _signed(raised: Tensor, offset: int) -> Tensor:
    return (raised.to(torch.int16) - offset).to(torch.int8)


def _one(stored: Tensor) -> tuple[Tensor, None]:
    return _half(stored, 0), None


def _with_minimum(stored: Tensor) -> tuple[Tensor, Tensor]:
    return _half(stored, 0), _half(stored, 2)


def _of_four_bits(stored: Tensor) -> tuple[Tensor, Tensor]:
    both = stored[:, :16]
    return _half(stored, 80) * (both & 15), -_half(stored, 82) * (both >> 4)


def _of_six_bits(stored: Tensor) -> tuple[Tensor, None]:
    whole = _planes(stored, (96, 104, 8, 4)) | (_planes(stored, (104, 108, 4, 2)) << 4)
    return _half(stored, 108) * _signed(whole, 32), None


def _both_of_six_bits(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Of eight groups, with their minima: a float16 of each times integers of 6 bits."""
    a, b, rest = stored[:, 4:8], stored[:, 8:12], stored[:, 12:16]
    scales = torch.cat([a & 63, (rest & 15) | ((a >> 2) & 48)], 1)
    minima = torch.cat([b & 63, (rest >> 4) | ((b >> 2) & 48)], 1)
    return _half(stored, 0) * scales, -_half(stored, 2) * minima


def _of_eight_bits(stored: Tensor) -> tuple[Tensor, None]:
    return _half(stored, 208) * stored[:, 192:208].contiguous().view(torch.int8), None


@dataclass(frozen=True)
class BlockType:
    """``count`` weights in ``size`` bytes, of which ``group`` share a scale. ``low``, ``high``: the bits of
    their values, which count from ``offset`` on where they are signed. ``scales`` gives scales and minima
    (None: there are none) from bytes ``[blocks, size]``."""

    count: int
    size: int
    dtype: str
    group: int
    low: Bits
    high: Bits | None = None
    offset: int = 0
    scales: Callable[[Tensor], tuple[Tensor, Tensor | None]] = _one

    @property
    def scheme(self) -> Scheme:
        """What formats ask for."""
        return Scheme(self.dtype, self.group)

    @property
    def is_super(self) -> bool:
        """Whether scales are products, which need float32."""
        return self.count > BLOCK

    def layer(self, path: str, stored: Tensor, scale_dtype: torch.dtype) -> Layer:
        """The layer whose bytes are ``stored``, ``[rows, bytes]``.

        >>> BLOCK_TYPES["Q8_0"].layer("fc", torch.ones(1, 34, dtype=torch.uint8), torch.float16).values.shape
        torch.Size([1, 32])
        """
        rows, blocks = len(stored), stored.reshape(-1, self.size)
        values = _planes(blocks, self.low)
        if self.high is not None:
            values |= _planes(blocks, self.high) << self.low[3]
        if not self.dtype.startswith("u"):
            values = _signed(values, self.offset)
        scale, minimum = self.scales(blocks)
        kept = None if minimum is None else minimum.reshape(rows, -1).to(scale_dtype)
        scales = scale.reshape(rows, -1).to(scale_dtype)
        return Layer(path, self.dtype, values.reshape(rows, -1), scales, minimum=kept)


#: What is read, by the name of the type.
BLOCK_TYPES = {
    "Q8_0": BlockType(32, 34, "int8", 32, (2, 34, 32, 8)),
    "Q4_0": BlockType(32, 18, "int4", 32, (2, 18, 16, 4), offset=8),
    "Q4_1": BlockType(32, 20, "uint4", 32, (4, 20, 16, 4), scales=_with_minimum),
    "Q5_0": BlockType(32, 22, "int8", 32, (6, 22, 16, 4), (2, 6, 1, 1), 16),
    "Q5_1": BlockType(32, 24, "uint8", 32, (8, 24, 16, 4), (4, 8, 1, 1), 0, _with_minimum),
    "Q2_K": BlockType(256, 84, "uint2", 16, (16, 80, 32, 2), scales=_of_four_bits),
    "Q3_K": BlockType(256, 110, "int3", 16, (32, 96, 32, 2), (0, 32, 32, 1), 4, _of_six_bits),
    "Q4_K": BlockType(256, 144, "uint4", 32, (16, 144, 32, 4), scales=_both_of_six_bits),
    "Q5_K": BlockType(
        256, 176, "uint8", 32, (48, 176, 32, 4), (16, 48, 32, 1), 0, _both_of_six_bits
    ),
    "Q6_K": BlockType(256, 210, "int8", 16, (0, 128, 64, 4), (128, 192, 32, 2), 32, _of_eight_bits),
}
