"""Padding of images: what kernels do themselves (``SAME``), and what an operator before them does."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from backquant.deploy.litert.call import Call
from backquant.deploy.litert.lowered_values import constant_tensor
from backquant.deploy.litert.network import Tensor

__all__ = ["SAME", "VALID", "Amounts", "padded", "same_padding"]

SAME, VALID = 0, 1  # the schema's numbers
Amounts = tuple[tuple[int, int], tuple[int, int]]


def same_padding(
    source: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Amounts | None:
    """What ``SAME`` adds before and after height and width; ``None`` where these are free.

    >>> image = Tensor("x", (1, 8, 9, 3), (1, 8, 9, 3), "FLOAT32")
    >>> same_padding(image, (3, 3), (2, 2), (1, 1))
    ((0, 1), (1, 1))
    """
    if -1 in source.signature[1:3] and tuple(stride) != (1, 1):
        return None
    amounts = []
    for n, k, s, d in zip(source.shape[1:3], kernel, stride, dilation, strict=True):
        reach = (k - 1) * d + 1
        total = max(0, (math.ceil(n / s) - 1) * s + reach - n)
        amounts.append((total // 2, total - total // 2))
    return amounts[0], amounts[1]


def padded(
    call: Call, source: Tensor, amounts: Amounts, same: Amounts | None, value: float | None = None
) -> tuple[Tensor, int]:
    """The image that a kernel reads, and how the kernel pads it.

    ``value``: what is added, if not zero: the lowest value (``-inf``). A kernel that pads by itself adds
    that.
    """
    if not any(map(any, amounts)):
        return source, VALID
    if amounts == same:
        return source, SAME
    (top, bottom), (left, right) = amounts
    rows = [(0, 0), (top, bottom), (left, right), (0, 0)]
    n, h, w, c = source.shape
    shape = (n, h + top + bottom, w + left + right, c)
    made = call.emitter.like(source, shape)
    inputs = [source, call.emitter.pairs(rows)]
    lowest = value is not None
    if lowest and source.scales is not None:
        low = -128 if source.dtype == "INT8" else -32768
        if source.scales.zero_point[0] != low:
            number = constant_tensor("lowest", np.array([low], source.dtype.lower()))
            number.scales = source.scales
            inputs.append(number)
    elif lowest:
        inputs.append(constant_tensor("lowest", np.array([value], np.float32)))
    call.emitter.emit("PADV2" if len(inputs) > 2 else "PAD", inputs, made)
    return made, VALID
