"""Small integers, two or four in a byte, or eight of 3 bits in three: how saved models hold them.

The first value lies in the lowest bits of the first byte. A signed value is stored in two's complement. The
last byte is filled up with zeros. A tensor is packed where its values fit, so that nothing is lost.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backquant.errors import ConfigError

_WIDTHS = (2, 3, 4)
_PACKED = (torch.int8, torch.uint8)
_LEAST = 16  # values of a tensor that is worth it


def bits_of_values(tensor: Tensor) -> int:
    """How many bits each value needs: 2, 3, 4 or 8 in an 8-bit tensor; in others the width of the dtype.

    >>> bits_of_values(torch.full((4, 8), -8, dtype=torch.int8)), bits_of_values(torch.zeros(8))
    (4, 32)
    """
    if tensor.dtype not in _PACKED or tensor.is_meta or tensor.numel() < _LEAST:
        return 8 * tensor.element_size()
    low, high = (int(end) for end in tensor.aminmax())
    for bits in _WIDTHS:
        half = 1 << (bits - 1)
        ends = (-half, half - 1) if tensor.dtype == torch.int8 else (0, 2 * half - 1)
        if ends[0] <= low and high <= ends[1]:
            return bits
    return 8


def stored_bytes(tensor: Tensor) -> int:
    """How many bytes a saved model needs for a tensor.

    >>> stored_bytes(torch.zeros(100, dtype=torch.int8)), stored_bytes(torch.zeros(100))
    (25, 400)
    """
    return math.ceil(tensor.numel() * bits_of_values(tensor) / 8)


def pack_integers(tensor: Tensor, bits: int) -> Tensor:
    """The values of an 8-bit tensor, which fit into ``bits``, as uint8 of one dimension.

    >>> pack_integers(torch.tensor([1, -1, 7], dtype=torch.int8), 4)
    tensor([241,   7], dtype=torch.uint8)
    """
    count, size = _unit(bits)
    values = tensor.reshape(-1).view(torch.uint8) & ((1 << bits) - 1)
    values = torch.nn.functional.pad(values, (0, -values.numel() % count)).reshape(-1, count)
    units = torch.zeros(len(values), dtype=torch.int32, device=values.device)
    for place in range(count):
        units |= values[:, place].to(torch.int32) << (bits * place)
    packed = torch.stack([(units >> (8 * byte)) & 255 for byte in range(size)], 1).reshape(-1)
    return packed[: math.ceil(tensor.numel() * bits / 8)].to(torch.uint8)


def _unit(bits: int) -> tuple[int, int]:
    """How many values fill how many whole bytes."""
    return math.lcm(8, bits) // bits, math.lcm(8, bits) // 8


def unpack_integers(packed: Tensor, bits: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    """The inverse of ``pack_integers``. Raises ``ConfigError`` for bytes that it cannot have written.

    >>> unpack_integers(torch.tensor([241, 7], dtype=torch.uint8), 4, [3], torch.int8)
    tensor([ 1, -1,  7], dtype=torch.int8)
    """
    number = math.prod(shape)
    plain = packed.dtype == torch.uint8 and packed.dim() == 1 and dtype in _PACKED
    if bits not in _WIDTHS or not plain or packed.numel() != math.ceil(number * bits / 8):
        raise ConfigError(
            f"{packed.numel()} bytes do not hold {shape} values of {bits} bits",
            where=f"packed {str(packed.dtype).removeprefix('torch.')}{list(packed.shape)}",
            fix="save the model again: backquant.save(quantized, path)",
        )
    count, size = _unit(bits)
    whole = torch.nn.functional.pad(packed, (0, -packed.numel() % size)).reshape(-1, size)
    units = torch.zeros(len(whole), dtype=torch.int32, device=whole.device)
    for byte in range(size):
        units |= whole[:, byte].to(torch.int32) << (8 * byte)
    mask = (1 << bits) - 1
    values = torch.stack([(units >> (bits * place)) & mask for place in range(count)], 1)
    values = values.reshape(-1).to(torch.uint8)
    if bool(values[number:].any()):
        raise ConfigError("bits after the last packed value are set", where=f"shape {shape}")
    values = values[:number].reshape(shape)
    if dtype == torch.uint8:
        return values
    half = 1 << (bits - 1)
    return ((values ^ half).view(torch.int8) - half).contiguous()
