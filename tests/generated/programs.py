"""Models written as programs: three values under several names, changed in place, seen through views, and
modules that are called more than once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Program", "draw"]

Line = tuple[str, int, int, Any]

_VIEWS: dict[str, Callable[[Any], Any]] = {
    "every other": lambda v: v[:, ::2],
    "first": lambda v: v[..., :1],
    "last": lambda v: v[:, -1:],
    "narrow": lambda v: v.narrow(1, 0, 1),
    "chunk": lambda v: v.chunk(2, 1)[0],
    "transpose": lambda v: v.transpose(2, 3),
    "flatten": lambda v: v.flatten(2),
    "select": lambda v: v.select(1, 0),
    "view": lambda v: v.view(v.shape[0], -1),
    "permute": lambda v: v.permute(0, 2, 3, 1),
    "itself": lambda v: v,
    "detach": lambda v: v.detach(),
    "view_as": lambda v: v.view_as(v),
    "reshape": lambda v: v.reshape(v.shape[0], -1),
    "contiguous": lambda v: v.contiguous(),
}
_CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "relu_": lambda v, _: v.relu_(),
    "relu": lambda v, _: F.relu(v, inplace=True),
    "mul_": lambda v, _: v.mul_(0.5),
    "add_": lambda v, _: v.add_(1.0),
    "clamp_": lambda v, _: v.clamp_(-0.5, 0.7),
    "sigmoid_": lambda v, _: v.sigmoid_(),
    "torch.relu_": lambda v, _: torch.relu_(v),
    "hardswish": lambda v, _: F.hardswish(v, inplace=True),
    "zero_": lambda v, _: v.zero_(),
    "copy_": lambda v, w: v.copy_(w),
    "fill_": lambda v, _: v.fill_(0.3),
    "add_ other": lambda v, w: v.add_(w),
    "mul_ other": lambda v, w: v.mul_(w),
}
_NEW: dict[str, Callable[[Any, Any], Any]] = {
    "other": lambda _, w: w,
    "add": lambda v, w: v + w,
    "mul": lambda v, w: v * w,
    "cat": lambda v, w: torch.cat([v, w], 1)[:, : v.shape[1]],
    "where": lambda v, w: torch.where(v > 0, v, w),
    "maximum": torch.maximum,
    "masked_fill": lambda v, w: v.masked_fill(w < 0, 0.0),
    "clone": lambda _, w: w.clone(),
    "stack": lambda v, w: torch.stack([v, w]).unbind(0)[1],
    "halves": lambda v, _: torch.cat(list(v.chunk(2, 1))[::-1], 1),
    "turned": lambda v, _: v.transpose(2, 3).contiguous().transpose(2, 3),
    "relu6": lambda v, _: F.relu6(v, inplace=True),
    "dropout": lambda v, _: F.dropout(v, 0.5, False),
}
_IN_PLACE = ("relu in place", "hardswish", "leaky", "dropout")


class Program(nn.Module):
    """Runs ``lines``, each an operation on two of three values; the first conv gives them."""

    def __init__(self, lines: list[Line], parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self.lines = lines
        self.parts = nn.ModuleDict(parts)

    def forward(self, x: Any) -> Any:
        values = [self.parts["begin"](x)]
        values += [values[0], self.parts["begin"](x)]
        for what, i, j, how in self.lines:
            self._run(values, what, i, j, how)
        if len(self.lines) % 2:
            return values[0] + values[1] * values[2]
        return torch.cat(values, 1)

    def _run(self, values: list[Any], what: str, i: int, j: int, how: Any) -> None:
        if what == "module":
            values[i] = self.parts[how](values[i])
        elif what == "module for its effect":
            self.parts[how](values[i])
        elif what == "change":
            view, change = how
            _CHANGES[change](_VIEWS[view](values[i]), _VIEWS[view](values[j]))
        elif what == "assign":
            value = values[i]
            if how == "+":
                value += values[j]
            elif how == "*":
                value *= values[j]
            elif how == "-":
                value -= 0.5
            else:
                value /= 2.0
        else:
            values[i] = _NEW[what](values[i], values[j])

    def extra_repr(self) -> str:
        return "\n".join(map(str, self.lines))


def draw(seed: int) -> tuple[Program, tuple[int, ...]]:
    """A program in evaluation mode, and the shape of its input."""
    choice = random.Random(seed)
    torch.manual_seed(seed)
    channels, height, width = (
        choice.choice((2, 4, 6)),
        choice.choice((1, 3, 4)),
        choice.choice((2, 4)),
    )
    parts = _parts(channels, width)
    lines = [_line(choice, list(parts)[1:]) for _ in range(choice.randint(2, 9))]
    return Program(lines, parts).eval(), (choice.choice((1, 2)), 3, height, width)


def _parts(channels: int, width: int) -> dict[str, nn.Module]:
    norm = nn.BatchNorm2d(channels)
    for value in (norm.running_var, norm.weight.data):
        assert value is not None
        value.uniform_(0.5, 2)
    return {
        "begin": nn.Conv2d(3, channels, 3, padding=1),
        "conv": nn.Conv2d(channels, channels, 3, padding=1),
        "norm": norm,
        "relu in place": nn.ReLU(inplace=True),
        "relu": nn.ReLU(),
        "linear": nn.Linear(width, width),
        "block": nn.Sequential(nn.Conv2d(channels, channels, 1), nn.ReLU(inplace=True)),
        "hardswish": nn.Hardswish(inplace=True),
        "pool": nn.MaxPool2d(3, 1, 1),
        "layer norm": nn.LayerNorm(width),
        "identity": nn.Identity(),
        "dropout": nn.Dropout(inplace=True),
        "leaky": nn.LeakyReLU(0.1, inplace=True),
        "sigmoid": nn.Sigmoid(),
    }


def _line(choice: random.Random, parts: list[str]) -> Line:
    usual = ["module"] * 7 + ["change"] * 5 + ["assign"] * 2 + ["module for its effect"]
    what, how = choice.choice([*usual, *_NEW]), None
    if what == "module":
        how = choice.choice(parts)
    elif what == "module for its effect":
        how = choice.choice(_IN_PLACE)
    elif what == "change":
        how = (choice.choice(list(_VIEWS)), choice.choice(list(_CHANGES)))
    elif what == "assign":
        how = choice.choice("+*-/")
    return what, choice.randrange(3), choice.randrange(3), how
