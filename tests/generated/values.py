"""Weights and inputs at the ends of what floats can be."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import nn

__all__ = ["FOREIGN", "NOT_FINITE", "VALUES", "drawn", "extreme_weights", "fill"]

Fill = Callable[[torch.Tensor, random.Random], torch.Tensor]


def _channel(x: torch.Tensor, choice: random.Random) -> torch.Tensor:
    """A view of one channel, or of one element of a vector."""
    dim = min(1, x.dim() - 1)
    return x.select(dim, choice.randrange(x.shape[dim])) if x.dim() and x.shape[dim] else x


def _one_huge(x: torch.Tensor, choice: random.Random) -> torch.Tensor:
    x = x.clone()
    _channel(x, choice).mul_(1e6)
    return x


def _one_zero(x: torch.Tensor, choice: random.Random) -> torch.Tensor:
    x = x.clone()
    _channel(x, choice).zero_()
    return x


def _outlier(x: torch.Tensor, choice: random.Random) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    if x.numel():
        x.view(-1)[choice.randrange(x.numel())] = choice.choice((1e4, -1e30, 3e38))
    return x


def _whole_range(x: torch.Tensor, _: random.Random) -> torch.Tensor:
    return x.sign() * 3.3e38


VALUES: dict[str, Fill] = {
    "normal": lambda x, _: x,
    "large": lambda x, _: x * 200,
    "1e30": lambda x, _: x * 1e30,
    "1e-30": lambda x, _: x * 1e-30,
    "subnormal": lambda x, _: x * 1e-40,
    "zeros": lambda x, _: torch.zeros_like(x),
    "a constant": lambda x, c: torch.full_like(x, c.choice((1.0, -3.0, 1e-3, 77.0))),
    "one huge channel": _one_huge,
    "one zero channel": _one_zero,
    "an outlier": _outlier,
    "positive": lambda x, _: x.abs(),
    "negative": lambda x, _: -x.abs(),
    "the whole range": _whole_range,
}

_ENDS = (float("nan"), float("inf"), -float("inf"))


def _some(x: torch.Tensor, choice: random.Random) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    for _ in range(3 if x.numel() else 0):
        x.view(-1)[choice.randrange(x.numel())] = choice.choice(_ENDS)
    return x


NOT_FINITE: dict[str, Fill] = {
    "some not finite": _some,
    "all NaN": lambda x, _: torch.full_like(x, _ENDS[0]),
    "infinite": lambda x, _: torch.full_like(x, _ENDS[1]).copysign(x),
}

FOREIGN: dict[str, Fill] = {
    "float64": lambda x, _: x.double(),
    "float16": lambda x, _: x.half(),
    "bfloat16": lambda x, _: x.bfloat16(),
    "int64": lambda x, _: x.long(),
    "uint8": lambda x, _: x.to(torch.uint8),
    "bool": lambda x, _: x > 0,
    "complex64": lambda x, _: x + 0j,
    "one dimension less": lambda x, _: x.new_zeros(x.shape[1:]),
    "one dimension more": lambda x, _: x[None],
    "a wider axis": lambda x, c: _wider(x, c.randrange(max(x.dim(), 1))),
    "an empty axis": lambda x, c: x.narrow(c.randrange(x.dim()), 0, 0) if x.dim() else x,
    "on meta": lambda x, _: x.to("meta"),
}


def _wider(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([x, x.narrow(dim, 0, min(1, x.shape[dim]))], dim) if x.dim() else x[None]


def drawn(shape: tuple[int, ...], choice: random.Random) -> torch.Tensor:
    generator = torch.Generator().manual_seed(choice.randrange(1 << 30))
    return torch.randn(shape, generator=generator)


def fill(x: torch.Tensor, choice: random.Random, plain: float = 0.6) -> tuple[str, torch.Tensor]:
    """``x`` with values of one kind, and its name; ``plain``: how often they stay as they are."""
    name = "normal" if choice.random() < plain else choice.choice(list(VALUES))
    return name, VALUES[name](x, choice)


_WEIGHTS = [name for name in VALUES if name not in ("an outlier", "the whole range")]


def extreme_weights(model: nn.Module, choice: random.Random) -> str:
    """Change one parameter of ``model`` to an extreme; the name of what was done."""
    named = [(n, p) for n, p in model.named_parameters() if p.numel()]
    if not named:
        return ""
    where, parameter = choice.choice(named)
    name = choice.choice(_WEIGHTS)
    moved = parameter.data.transpose(0, 1) if parameter.dim() > 1 else parameter.data
    parameter.data.copy_(
        VALUES[name](moved, choice).transpose(0, 1)
        if parameter.dim() > 1
        else VALUES[name](moved, choice)
    )
    return f"{where}: {name}"
