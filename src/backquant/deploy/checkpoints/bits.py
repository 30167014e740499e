"""Small integers and floats of 4 bits, packed.

Integers stand in words of 32 bits, as checkpoint formats have them: the first value of a row in the lowest
bits of its first word, the last word filled up with zeros; or in another order within a word.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backquant.dtypes import pack_integers, unpack_integers

_WORD = 32
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # by the bits behind the sign
#: AWQ: which of the eight values of a word lies at each place.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_words(values: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Rows of values from 0 to ``2**bits - 1`` as rows of int32.

    ``order``: which value of a word lies at each place, where it is not the first one first.

    >>> pack_words(torch.tensor([[1, 2, 3]]), 4)
    tensor([[801]], dtype=torch.int32)
    >>> pack_words(torch.tensor([list(range(8))]), 4, AWQ_ORDER) == 0x75316420
    tensor([[True]])
    """
    rows, count = values.shape
    if order:
        values = values.reshape(rows, -1, len(order))[:, :, list(order)].reshape(rows, count)
    whole = _WORD // math.gcd(bits, _WORD)
    padded = torch.nn.functional.pad(values.to(torch.uint8), (0, -count % whole))
    packed = padded.flatten() if bits == 8 else pack_integers(padded, bits)
    words = packed.view(torch.int32).reshape(rows, -1)
    return words[:, : math.ceil(count * bits / _WORD)].contiguous()


def unpack_words(words: Tensor, bits: int, count: int, order: tuple[int, ...] = ()) -> Tensor:
    """The inverse of ``pack_words``: ``count`` values a row, as uint8.

    >>> unpack_words(torch.tensor([[801]], dtype=torch.int32), 4, 3)
    tensor([[1, 2, 3]], dtype=torch.uint8)
    """
    rows = len(words)
    steps = _WORD // math.gcd(bits, _WORD) * bits // _WORD  # words that hold whole values
    padded = torch.nn.functional.pad(words, (0, -words.shape[1] % steps)).contiguous()
    held = padded.shape[1] * _WORD // bits
    packed = padded.view(torch.uint8).flatten()
    values = packed if bits == 8 else unpack_integers(packed, bits, [rows * held], torch.uint8)
    values = values.reshape(rows, held)[:, :count]
    if not order:
        return values.contiguous()
    back = [order.index(place) for place in range(len(order))]
    return values.reshape(rows, -1, len(order))[:, :, back].reshape(rows, count)


def pack_e2m1(values: Tensor) -> Tensor:
    """Rows of E2M1 values as uint8, two a byte, the first in the low bits.

    >>> pack_e2m1(torch.tensor([[0.5, -6.0]]))
    tensor([[241]], dtype=torch.uint8)
    """
    if values.is_meta:
        return values.new_empty((len(values), values.shape[1] // 2), dtype=torch.uint8)
    x = values.float()
    codes = torch.bucketize(x.abs(), _E2M1) + 8 * torch.signbit(x)
    return pack_integers(codes.to(torch.uint8), 4).reshape(len(values), -1)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """The inverse of ``pack_e2m1``, as float8_e4m3fn.

    >>> unpack_e2m1(torch.tensor([[241]], dtype=torch.uint8)).float()
    tensor([[ 0.5000, -6.0000]])
    """
    shape = [len(packed), 2 * packed.shape[1]]
    codes = unpack_integers(packed.flatten(), 4, shape, torch.uint8).long()
    return torch.cat([_E2M1, -_E2M1])[codes].to(torch.float8_e4m3fn)
