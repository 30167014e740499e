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


@dataclass(frozen=True)
class BlockType:
    """``count`` weights in ``size`` bytes, of which ``group`` share a scale; ``parts`` gives their values,
    scales and minima (None: there are none) from bytes ``[blocks, size]``."""

    count: int
    size: int
    dtype: str
    group: int
    parts: Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]

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
        rows = len(stored)
        values, scale, minimum = self.parts(stored.reshape(-1, self.size))
        kept = None if minimum is None else minimum.reshape(rows, -1).to(scale_dtype)
        scales = scale.reshape(rows, -1).to(scale_dtype)
        return Layer(path, self.dtype, values.reshape(rows, -1), scales, minimum=kept)


def _planes(packed: Tensor, width: int, bits: int) -> Tensor:
    """Values of ``bits`` bits from the planes of each ``width`` bytes.

    >>> _planes(torch.tensor([[0x21, 0x43]], dtype=torch.uint8), 2, 4)
    tensor([[1, 3, 2, 4]], dtype=torch.uint8)
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).reshape(1, 1, -1, 1)
    spread = packed.reshape(len(packed), -1, 1, width) >> shifts
    return (spread & ((1 << bits) - 1)).reshape(len(packed), -1)


def _halves(stored: Tensor) -> Tensor:
    return stored.contiguous().view(torch.float16).float()


def _signed(raised: Tensor, offset: int) -> Tensor:
    return (raised.to(torch.int16) - offset).to(torch.int8)


def _q8_0(stored: Tensor) -> tuple[Tensor, Tensor, None]:
    return stored[:, 2:].contiguous().view(torch.int8), _halves(stored[:, :2]), None


def _q4_0(stored: Tensor) -> tuple[Tensor, Tensor, None]:
    return _signed(_planes(stored[:, 2:], 16, 4), 8), _halves(stored[:, :2]), None


def _q4_1(stored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _planes(stored[:, 4:], 16, 4), _halves(stored[:, :2]), _halves(stored[:, 2:4])


def _five_bits(stored: Tensor) -> Tensor:
    return _planes(stored[:, 4:], 16, 4) | (_planes(stored[:, :4], 1, 1) << 4)


def _q5_0(stored: Tensor) -> tuple[Tensor, Tensor, None]:
    return _signed(_five_bits(stored[:, 2:]), 16), _halves(stored[:, :2]), None


def _q5_1(stored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _five_bits(stored[:, 4:]), _halves(stored[:, :2]), _halves(stored[:, 2:4])


def _q2_k(stored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    both, one, low = stored[:, :16], _halves(stored[:, 80:82]), _halves(stored[:, 82:84])
    return _planes(stored[:, 16:80], 32, 2), one * (both & 15), -low * (both >> 4)


def _q3_k(stored: Tensor) -> tuple[Tensor, Tensor, None]:
    high, packed, scales = stored[:, :32], stored[:, 32:96], stored[:, 96:108]
    values = _planes(packed, 32, 2) | (_planes(high, 32, 1) << 2)
    whole = _planes(scales[:, :8], 8, 4) | (_planes(scales[:, 8:], 4, 2) << 4)
    return _signed(values, 4), _halves(stored[:, 108:]) * _signed(whole, 32), None


def _scales_of_six_bits(stored: Tensor) -> tuple[Tensor, Tensor]:
    """Of eight groups, with their minima: a float16 of each times integers of 6 bits."""
    one, low = _halves(stored[:, :2]), _halves(stored[:, 2:4])
    a, b, rest = stored[:, 4:8], stored[:, 8:12], stored[:, 12:16]
    scales = torch.cat([a & 63, (rest & 15) | ((a >> 2) & 48)], 1)
    return one * scales, -low * torch.cat([b & 63, (rest >> 4) | ((b >> 2) & 48)], 1)


def _q4_k(stored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _planes(stored[:, 16:], 32, 4), *_scales_of_six_bits(stored)


def _q5_k(stored: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values = _planes(stored[:, 48:], 32, 4) | (_planes(stored[:, 16:48], 32, 1) << 4)
    return values, *_scales_of_six_bits(stored)


def _q6_k(stored: Tensor) -> tuple[Tensor, Tensor, None]:
    values = _planes(stored[:, :128], 64, 4) | (_planes(stored[:, 128:192], 32, 2) << 4)
    scales = stored[:, 192:208].contiguous().view(torch.int8)
    return _signed(values, 32), _halves(stored[:, 208:]) * scales, None


#: What is read, by the name of the type.
BLOCK_TYPES = {
    "Q8_0": BlockType(32, 34, "int8", 32, _q8_0),
    "Q4_0": BlockType(32, 18, "int4", 32, _q4_0),
    "Q4_1": BlockType(32, 20, "uint4", 32, _q4_1),
    "Q5_0": BlockType(32, 22, "int8", 32, _q5_0),
    "Q5_1": BlockType(32, 24, "uint8", 32, _q5_1),
    "Q2_K": BlockType(256, 84, "uint2", 16, _q2_k),
    "Q3_K": BlockType(256, 110, "int3", 16, _q3_k),
    "Q4_K": BlockType(256, 144, "uint4", 32, _q4_k),
    "Q5_K": BlockType(256, 176, "uint8", 32, _q5_k),
    "Q6_K": BlockType(256, 210, "int8", 16, _q6_k),
}
