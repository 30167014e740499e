"""Cases of convolutions and linear layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.nn import intrinsic
from kernel_audit.case import Case, drawn_qparams, fitting, weighted

__all__ = ["FAMILIES"]

_CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_WIDTHS = (1, 2, 3, 5, 8, 15, 16, 17, 24, 32, 33, 64)
_BATCHES = (0, 1, 1, 2, 3)
_CLAMPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda x: x,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 0.7),
}
_SMOOTH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "hardswish": F.hardswish,
    "silu": F.silu,
}
_LINEAR_ONLY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "tanh": torch.tanh,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
}


def _sizes(choice: random.Random, dims: int, least: int) -> tuple[int, ...]:
    largest = {1: 40, 2: 18, 3: 8}[dims]
    return tuple(choice.randint(least, max(least, largest)) for _ in range(dims))


def _shapes(choice: random.Random, channels: int, least: list[int]) -> list[Any]:
    found = []
    for _ in range(3):
        size = tuple(
            _sizes(choice, 1, n)[0] if len(least) == 1 else choice.randint(n, n + 9) for n in least
        )
        batch = choice.choice(_BATCHES)
        found.append(((batch, channels, *size),))
    if choice.random() < 0.15:
        found.append((found[0][0][1:],))  # without a batch
    return found


def _with_out(case: Case, choice: random.Random, floats: float = 0.2) -> Case:
    """``case`` with qparams for its result, or a float result."""
    if choice.random() < floats:
        return case
    holder = nn.Module()
    for name, child in case.children.items():
        holder.add_module(name, child)
    with torch.no_grad():
        inputs = [
            (torch.randint(q.quant_min, q.quant_max + 1, (2, *shape[1:])).float() - q.zero_point)
            * q.scale
            for shape, q in zip(case.shapes[0], case.qparams, strict=True)
        ]
        value = case.operator(holder, *inputs)
    case.out = fitting(value, choice, case.qparams[0].dtype)
    return case


def conv(choice: random.Random) -> Case:
    dims = choice.choice((1, 2, 2, 2, 3))
    kind = choice.choice(("dense", "dense", "grouped", "depthwise", "point"))
    inputs, outputs = choice.choice(_WIDTHS), choice.choice(_WIDTHS)
    groups = 1
    if kind == "grouped":
        groups = choice.choice((2, 3, 4))
        inputs, outputs = inputs * groups, outputs * groups
    if kind == "depthwise":
        groups, outputs = inputs, inputs * choice.choice((1, 1, 1, 2))
    kernel = tuple(
        1 if kind == "point" else choice.choice((1, 2, 3, 3, 5, 7)[: 7 - dims]) for _ in range(dims)
    )
    stride = tuple(choice.choice((1, 1, 2, 3)) for _ in range(dims))
    dilation = tuple(choice.choice((1, 1, 1, 2)) for _ in range(dims))
    padding: Any = tuple(choice.choice((0, 1, k // 2)) for k in kernel)
    if all(s == 1 for s in stride) and choice.random() < 0.15:
        padding = choice.choice(("same", "valid"))
    bias = choice.random() < 0.7
    module = _CONVS[dims](inputs, outputs, kernel, stride, padding, dilation, groups, bias)
    acts = {**_CLAMPS, **_SMOOTH} if dims == 2 else _CLAMPS
    act = choice.choice(list(acts))
    least = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    case = Case(
        "conv",
        f"{module} {act}",
        lambda self, x: acts[act](self.op(x)),
        _shapes(choice, inputs, least),
        (drawn_qparams(choice),),
        None,
        {"op": weighted(module, choice)},
    )
    return _with_out(case, choice)


def conv_transpose(choice: random.Random) -> Case:
    dims = choice.choice((1, 2, 2, 3))
    groups = choice.choice((1, 1, 2))
    inputs, outputs = groups * choice.choice(_WIDTHS), groups * choice.choice(_WIDTHS)
    kernel = tuple(choice.choice((1, 2, 3, 4)) for _ in range(dims))
    stride = tuple(choice.choice((1, 2)) for _ in range(dims))
    padding = tuple(choice.choice((0, k // 2)) for k in kernel)
    dilation = (choice.choice((1, 1, 1, 2)),) * dims
    extra = tuple(choice.choice((0, 0, s - 1)) for s in stride)
    module = _TRANSPOSED[dims](
        inputs, outputs, kernel, stride, padding, extra, groups, choice.random() < 0.7, dilation
    )
    case = Case(
        "conv_transpose",
        str(module),
        lambda self, x: self.op(x),
        _shapes(choice, inputs, [3] * dims),
        (drawn_qparams(choice),),
        None,
        {"op": weighted(module, choice, per_channel=False)},
    )
    return _with_out(case, choice, 0.0)


def conv_add(choice: random.Random) -> Case:
    """A convolution, another tensor of its shape or one that broadcasts, and ReLU or nothing."""
    groups = choice.choice((1, 1, 2))
    inputs, outputs = groups * choice.choice(_WIDTHS), groups * choice.choice(_WIDTHS)
    kernel, stride = choice.choice((1, 2, 3)), choice.choice((1, 2))
    padding = choice.choice((0, kernel // 2))
    module = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups)
    relu = choice.random() < 0.5
    made: Any = (
        intrinsic.ConvAddReLU2d(module, torch.add, nn.ReLU())
        if relu
        else intrinsic.ConvAdd2d(module, torch.add)
    )
    made[0] = weighted(module, choice)
    shapes = []
    for _ in range(3):
        batch, high, wide = choice.choice(_BATCHES), choice.randint(3, 12), choice.randint(3, 12)
        size = [(n + 2 * padding - kernel) // stride + 1 for n in (high, wide)]
        full = (batch, outputs, *size)
        other = choice.choice((full, full, (1, outputs, 1, 1), (batch, 1, *size), (outputs, 1, 1)))
        other = other if shapes else full
        shapes.append(((batch, inputs, high, wide), other))
    case = Case(
        "conv_add",
        f"{module} {'relu' if relu else ''}",
        lambda self, x, y: self.op(x, y),
        shapes,
        (drawn_qparams(choice), drawn_qparams(choice)),
        None,
        {"op": made},
    )
    return _with_out(case, choice, 0.0)


def linear(choice: random.Random) -> Case:
    inputs, outputs = choice.choice(_WIDTHS), choice.choice(_WIDTHS)
    module = nn.Linear(inputs, outputs, choice.random() < 0.7)
    acts = {**_CLAMPS, **_SMOOTH, **_LINEAR_ONLY}
    act = choice.choice(list(acts))
    shapes: list[Any] = []
    for _ in range(4):
        rank = choice.randint(0, 4)
        lead = tuple(choice.choice((1, 1, 2, 3, 9, 20, 0)) for _ in range(rank))
        shapes.append(((*lead, inputs),))
    shapes[0] = ((7, inputs),)
    case = Case(
        "linear",
        f"{module} {act}",
        lambda self, x: acts[act](self.op(x)),
        shapes,
        (drawn_qparams(choice),),
        None,
        {"op": weighted(module, choice)},
    )
    return _with_out(case, choice)


FAMILIES = {"conv": conv, "conv_transpose": conv_transpose, "conv_add": conv_add, "linear": linear}
