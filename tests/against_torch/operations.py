"""What random models are made of: one `Operation` per spelling of an operator.

Values are batches of vectors (rank 2), sequences (rank 3) or images (rank 4), of batch size 2.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["FUNCTIONAL", "OPERATIONS", "Operation"]

Shape = tuple[int, ...]
Call = Callable[..., Any]


@dataclass(frozen=True)
class Operation:
    """``call(module, first, second)`` computes the value; operations of one value ignore ``second``.

    ``make(choose, shape, second_shape)`` makes the module, or tuple of modules, that it calls.
    ``keyword`` is the same call with arguments given by name. ``second`` says what the other value
    has to be: of the same shape, or joinable along axis 1. ``weight`` is its relative frequency.
    """

    name: str
    call: Call
    ranks: tuple[int, ...] = (2, 3, 4)
    make: Callable[[random.Random, Shape, Shape], Any] | None = None
    keyword: Call | None = None
    second: str = ""
    weight: float = 1.0


def _conv(choose: random.Random, shape: Shape, _: Shape = ()) -> nn.Module:
    cls = nn.Conv1d if len(shape) == 3 else nn.Conv2d
    channels = shape[1]
    kind = choose.choice(["dense", "dense", "pointwise", "depthwise", "strided"])
    if kind == "pointwise":
        return cls(channels, choose.choice([4, 6, 8]), 1, bias=choose.random() < 0.5)
    if kind == "depthwise":
        return cls(channels, channels, 3, padding=1, groups=channels)
    stride = 2 if kind == "strided" and shape[-1] > 4 else 1
    return cls(channels, choose.choice([4, 8]), 3, stride=stride, padding=1)


def _norm(channels: int, rank: int) -> nn.Module:
    return (nn.BatchNorm2d if rank == 4 else nn.BatchNorm1d)(channels)


def _conv_norm(choose: random.Random, shape: Shape, _: Shape = ()) -> tuple[nn.Module, ...]:
    conv = _conv(choose, shape)
    return conv, _norm(conv.out_channels, len(shape))


def _linear(choose: random.Random, shape: Shape, _: Shape = ()) -> nn.Module:
    return nn.Linear(shape[-1], choose.choice([4, 6, 8]), bias=choose.random() < 0.8)


def _one(cls: Callable[[], nn.Module]) -> Callable[[random.Random, Shape, Shape], nn.Module]:
    return lambda choose, shape, second: cls()


def _module(name: str, make: Callable[[], nn.Module], **options: Any) -> Operation:
    return Operation(name, lambda m, x, y: m(x), make=_one(make), **options)


class FunctionalConv(nn.Module):
    """A convolution whose parameters are arguments of a function."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.kernel, self.shift = conv.weight, conv.bias
        self.options = {"stride": conv.stride, "padding": conv.padding, "groups": conv.groups}
        self.rank = conv.weight.dim()

    def forward(self, x: Any) -> Any:
        call = F.conv1d if self.rank == 3 else F.conv2d
        stride, padding, groups = self.options.values()
        # PyTorch's lowering takes dilation as a tuple only.
        return call(x, self.kernel, self.shift, stride, padding, (1,) * len(stride), groups)


class FunctionalLinear(nn.Module):
    """A linear layer whose parameters are arguments of a function."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.matrix, self.shift = linear.weight, linear.bias

    def forward(self, x: Any) -> Any:
        return F.linear(x, self.matrix, self.shift)


FUNCTIONAL = (FunctionalConv, FunctionalLinear)


def _add_(x: Any, y: Any) -> Any:
    x = x.clone()
    x += y
    return x


def _mul_(x: Any, y: Any) -> Any:
    x = x.clone()
    x *= y
    return x


def _two_halves(x: Any) -> Any:
    first, second = torch.chunk(x, 2, 1)
    return torch.cat([second, first], 1)


_IMAGES = (4,)
_MAPS = (3, 4)
_PAIR = "same shape"
_JOIN = "joinable"

WEIGHTED = [
    Operation("conv", lambda m, x, y: m(x), _MAPS, _conv, weight=3),
    Operation("conv bn", lambda m, x, y: m[1](m[0](x)), _MAPS, _conv_norm, weight=2),
    Operation("conv bn relu", lambda m, x, y: F.relu(m[1](m[0](x))), _MAPS, _conv_norm, weight=2),
    Operation("conv relu", lambda m, x, y: F.relu(m(x), inplace=True), _MAPS, _conv, weight=2),
    Operation("conv relu method", lambda m, x, y: m(x).relu(), _MAPS, _conv),
    Operation(
        "conv add relu",
        lambda m, x, y: torch.relu(m(x) + x),
        _MAPS,
        lambda c, s, _: (nn.Conv1d if len(s) == 3 else nn.Conv2d)(s[1], s[1], 3, padding=1),
        weight=2,
    ),
    Operation(
        "functional conv",
        lambda m, x, y: m(x),
        _MAPS,
        lambda c, s, _: FunctionalConv(_conv(c, s)),
    ),
    Operation("linear", lambda m, x, y: m(x), make=_linear, weight=3),
    Operation("linear relu", lambda m, x, y: F.relu(m(x)), make=_linear, weight=2),
    Operation(
        "functional linear",
        lambda m, x, y: m(x),
        make=lambda c, s, _: FunctionalLinear(_linear(c, s)),
    ),
    Operation(
        "batch norm",
        lambda m, x, y: m(x),
        _MAPS,
        lambda c, s, _: _norm(s[1], len(s)),
    ),
    Operation(
        "batch norm relu",
        lambda m, x, y: F.relu(m(x)),
        _MAPS,
        lambda c, s, _: _norm(s[1], len(s)),
    ),
    Operation("layer norm", lambda m, x, y: m(x), make=lambda c, s, _: nn.LayerNorm(s[-1])),
]

ACTIVATIONS = [
    _module("ReLU", nn.ReLU),
    _module("ReLU in place", lambda: nn.ReLU(inplace=True), weight=0.5),
    _module("ReLU6", nn.ReLU6),
    _module("Hardswish", nn.Hardswish),
    _module("Sigmoid", nn.Sigmoid),
    _module("Hardsigmoid", nn.Hardsigmoid),
    _module("Tanh", nn.Tanh),
    _module("LeakyReLU", nn.LeakyReLU, weight=0.5),
    _module("ELU", nn.ELU, weight=0.5),
    _module("GELU", nn.GELU, weight=0.5),
    _module("Softmax", lambda: nn.Softmax(1), weight=0.5),
    _module("Dropout", nn.Dropout),
    _module("Identity", nn.Identity, weight=0.5),
    Operation("F.relu", lambda m, x, y: F.relu(x), keyword=lambda m, x, y: F.relu(input=x)),
    Operation("torch.relu", lambda m, x, y: torch.relu(x)),
    Operation(".relu", lambda m, x, y: x.relu()),
    Operation(".relu_", lambda m, x, y: x.clone().relu_()),
    Operation("F.relu6", lambda m, x, y: F.relu6(x), keyword=lambda m, x, y: F.relu6(input=x)),
    Operation("F.hardswish", lambda m, x, y: F.hardswish(x)),
    Operation("F.hardsigmoid", lambda m, x, y: F.hardsigmoid(x)),
    Operation(
        "torch.sigmoid",
        lambda m, x, y: torch.sigmoid(x),
        keyword=lambda m, x, y: torch.sigmoid(input=x),
    ),
    Operation(".sigmoid", lambda m, x, y: x.sigmoid()),
    Operation(".sigmoid_", lambda m, x, y: x.clone().sigmoid_(), weight=0.5),
    Operation("torch.tanh", lambda m, x, y: torch.tanh(x)),
    Operation(".tanh", lambda m, x, y: x.tanh()),
    Operation("F.hardtanh", lambda m, x, y: F.hardtanh(x), weight=0.5),
    Operation("F.leaky_relu", lambda m, x, y: F.leaky_relu(x, 0.2), weight=0.5),
    Operation("F.dropout", lambda m, x, y: F.dropout(x, 0.5, False), weight=0.5),
]

ELEMENTWISE = [
    Operation("+", lambda m, x, y: x + y, second=_PAIR, weight=2),
    Operation(
        "torch.add",
        lambda m, x, y: torch.add(x, y),
        second=_PAIR,
        keyword=lambda m, x, y: torch.add(x, other=y),
    ),
    Operation(".add", lambda m, x, y: x.add(y), second=_PAIR, weight=0.5),
    Operation("+=", lambda m, x, y: _add_(x, y), second=_PAIR),
    Operation("add relu", lambda m, x, y: F.relu(x + y), second=_PAIR),
    Operation("*", lambda m, x, y: x * y, second=_PAIR),
    Operation(
        "torch.mul",
        lambda m, x, y: torch.mul(x, y),
        second=_PAIR,
        keyword=lambda m, x, y: torch.mul(input=x, other=y),
    ),
    Operation("*=", lambda m, x, y: _mul_(x, y), second=_PAIR, weight=0.5),
    Operation("mul relu", lambda m, x, y: torch.relu(torch.mul(x, y)), second=_PAIR, weight=0.5),
    Operation("+ number", lambda m, x, y: x + 1.5),
    Operation("number *", lambda m, x, y: 2 * x),
    Operation("torch.mul number", lambda m, x, y: torch.mul(x, 0.5)),
    Operation("add number relu", lambda m, x, y: F.relu(x + 1), weight=0.5),
    Operation("* size", lambda m, x, y: x * x.size(0), weight=0.5),
    Operation(
        "gate",
        lambda m, x, y: x * torch.sigmoid(m(F.adaptive_avg_pool2d(x, 1))),
        _IMAGES,
        lambda c, s, _: nn.Conv2d(s[1], s[1], 1),
    ),
]

JOINS = [
    Operation(
        "cat",
        lambda m, x, y: torch.cat([x, y], 1),
        second=_JOIN,
        keyword=lambda m, x, y: torch.cat(tensors=[x, y], dim=1),
        weight=3,
    ),
    Operation("cat tuple", lambda m, x, y: torch.cat((y, x), dim=1), second=_JOIN),
    Operation("cat itself", lambda m, x, y: torch.cat([x, x], 1), weight=0.5),
    Operation("stack", lambda m, x, y: torch.stack([x, y], 1).sum(1), second=_PAIR, weight=0.3),
]

POOLING = [
    _module("MaxPool2d", lambda: nn.MaxPool2d(3, 1, 1), ranks=_IMAGES),
    _module("AvgPool2d", lambda: nn.AvgPool2d(3, 1, 1), ranks=_IMAGES),
    _module("AdaptiveAvgPool2d", lambda: nn.AdaptiveAvgPool2d(3), ranks=_IMAGES, weight=0.5),
    Operation(
        "F.max_pool2d",
        lambda m, x, y: F.max_pool2d(x, 3, 1, 1),
        _IMAGES,
        keyword=lambda m, x, y: F.max_pool2d(input=x, kernel_size=3, stride=1, padding=1),
    ),
    Operation(
        "F.avg_pool2d",
        lambda m, x, y: F.avg_pool2d(x, 3, 1, 1),
        _IMAGES,
        keyword=lambda m, x, y: F.avg_pool2d(x, kernel_size=3, stride=1, padding=1),
    ),
    Operation("F.adaptive_avg_pool2d", lambda m, x, y: F.adaptive_avg_pool2d(x, 2), _IMAGES),
    Operation("max_pool1d", lambda m, x, y: F.max_pool1d(x, 3, 1, 1), (3,)),
    Operation("mean", lambda m, x, y: x.mean(-1), _MAPS),
    Operation("torch.mean", lambda m, x, y: torch.mean(x, (2, 3)), _IMAGES, weight=0.5),
]

SHAPES = [
    Operation("flatten", lambda m, x, y: torch.flatten(x, 1), _MAPS),
    Operation("flatten images", lambda m, x, y: torch.flatten(x, 2), _IMAGES, weight=0.5),
    Operation("Flatten", lambda m, x, y: m(x), _MAPS, _one(nn.Flatten), weight=0.5),
    Operation("reshape", lambda m, x, y: x.reshape(x.size(0), -1), _MAPS),
    Operation("reshape whole", lambda m, x, y: x.reshape(x.shape), weight=0.5),
    Operation("view", lambda m, x, y: x.contiguous().view(x.shape[0], -1), _MAPS),
    Operation("permute", lambda m, x, y: x.permute(0, 1, 3, 2), _IMAGES),
    Operation("transpose", lambda m, x, y: x.transpose(1, 2), _MAPS, weight=0.5),
    Operation("unsqueeze", lambda m, x, y: x.unsqueeze(1), (2, 3)),
    Operation("squeeze", lambda m, x, y: torch.unsqueeze(x, 1).squeeze(1), weight=0.5),
    Operation("clone", lambda m, x, y: x.clone(), weight=0.5),
    Operation("contiguous", lambda m, x, y: x.contiguous(), weight=0.5),
    Operation("chunks", lambda m, x, y: _two_halves(x), weight=0.5),
    Operation("repeat", lambda m, x, y: x.repeat_interleave(2, 1), weight=0.5),
    Operation("slice", lambda m, x, y: x[:, 1:], weight=0.5),
    Operation("interpolate", lambda m, x, y: F.interpolate(x, (6, 6)), _IMAGES, weight=0.5),
]

FLOAT = [  # no backend quantizes these
    Operation("sin", lambda m, x, y: torch.sin(x), weight=0.7),
    Operation("softplus", lambda m, x, y: F.softplus(x), weight=0.7),
    Operation("/ number", lambda m, x, y: x / 3, weight=0.5),
    Operation("-", lambda m, x, y: x - y, second=_PAIR, weight=0.5),
    Operation("masked_fill", lambda m, x, y: x.masked_fill(x > 0, 0.5), weight=0.5),
    Operation(
        "matmul",
        lambda m, x, y: torch.matmul(x, x.transpose(-2, -1)),
        _MAPS,
        weight=0.5,
    ),
    Operation("centre", lambda m, x, y: x - x.mean(-1, keepdim=True), weight=0.3),
    Operation("sub operator", lambda m, x, y: operator.sub(2, x), weight=0.3),
]

OPERATIONS: tuple[Operation, ...] = (
    *WEIGHTED,
    *ACTIVATIONS,
    *ELEMENTWISE,
    *JOINS,
    *POOLING,
    *SHAPES,
    *FLOAT,
)
