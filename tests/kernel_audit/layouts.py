"""The same shape in other memory: strides, offsets and repeated elements that models make.

A layout takes a contiguous tensor and a generator of random numbers, and gives a tensor of the same shape and
dtype. Its values are the given ones, except where a layout repeats elements.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

__all__ = ["LAYOUTS", "Layout"]

Layout = Callable[[torch.Tensor, random.Random], torch.Tensor]
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def contiguous(x: torch.Tensor, _: random.Random) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def channels_last(x: torch.Tensor, _: random.Random) -> torch.Tensor:
    """As a convolution gives it; two dimensions swapped where there is no such format."""
    if x.dim() in _LAST:
        return x.clone().contiguous(memory_format=_LAST[x.dim()])
    return swapped(x, _) if x.dim() > 2 else contiguous(x, _)


def swapped(x: torch.Tensor, _: random.Random) -> torch.Tensor:
    """A transposed view of the last two dimensions."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x.clone()


def tokens(x: torch.Tensor, _: random.Random) -> torch.Tensor:
    """Images made of tokens: ``[batch, pixels, channels]``, transposed and reshaped."""
    if x.dim() < 3 or not x.numel():
        return swapped(x, _)
    rows = x.flatten(2).transpose(1, 2).contiguous()
    return rows.transpose(1, 2).reshape(x.shape)


def permuted(x: torch.Tensor, choice: random.Random) -> torch.Tensor:
    order = list(range(x.dim()))
    choice.shuffle(order)
    back = sorted(range(x.dim()), key=order.__getitem__)
    return x.permute(order).contiguous().permute(back)


def sliced(x: torch.Tensor, choice: random.Random) -> torch.Tensor:
    """A part of a larger tensor, from an offset on, along one dimension; sometimes of every other element."""
    if not x.dim():
        return offset(x, choice)
    dim, step, first = choice.randrange(x.dim()), choice.choice((1, 2, 3)), choice.randrange(1, 5)
    size = list(x.shape)
    size[dim] = first + step * size[dim] + 2
    large = torch.full(size, 77, dtype=x.dtype)
    if choice.random() < 0.5 and x.dim() in _LAST:
        large = large.contiguous(memory_format=_LAST[x.dim()])
    end = first + step * x.shape[dim]
    view = large[(slice(None),) * dim + (slice(first, end, step),)]
    return view.copy_(x)


def offset(x: torch.Tensor, choice: random.Random) -> torch.Tensor:
    """Contiguous, from an odd address on."""
    first = choice.randrange(1, 64)
    large = torch.full((first + x.numel() + 9,), 77, dtype=x.dtype)
    return large[first : first + x.numel()].view(x.shape).copy_(x)


def expanded(x: torch.Tensor, choice: random.Random) -> torch.Tensor:
    """One element along some dimensions, seen many times."""
    if not x.numel() or not x.dim():
        return x.clone()
    one = x
    for dim in choice.sample(range(x.dim()), choice.randrange(1, x.dim() + 1)):
        one = one.narrow(dim, 0, 1)
    return one.clone().expand(x.shape)


def loose(x: torch.Tensor, choice: random.Random) -> torch.Tensor:
    """Dimensions of size 1 have strides that nothing follows from, as views of them leave behind."""
    x = channels_last(x, choice) if choice.random() < 0.5 else x.clone()
    strides = [
        choice.choice((0, 1, 2, 7, 10_000)) if n == 1 else s
        for n, s in zip(x.shape, x.stride(), strict=True)
    ]
    return x.as_strided(x.shape, strides)


LAYOUTS: dict[str, Layout] = {
    "contiguous": contiguous,
    "channels last": channels_last,
    "swapped": swapped,
    "tokens": tokens,
    "permuted": permuted,
    "sliced": sliced,
    "offset": offset,
    "expanded": expanded,
    "loose": loose,
}
