"""Operators on both sides of each limit of Vela, each as a PyTorch module and as a TFLite call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["Binary", "Call", "Case", "Operand", "Unary", "nhwc"]

SAME, VALID = 0, 1


@dataclass(frozen=True, eq=False)
class Operand:
    """One tensor of a TFLite file: shape, dtype, values where it is a constant, and its scales."""

    shape: tuple[int, ...]
    dtype: str = "int8"
    values: Any = None
    scales: tuple[float, ...] = (0.05,)
    axis: int = 0


@dataclass(frozen=True)
class Call:
    """One operator: its name in the TFLite schema, its operands, and the fields of its options."""

    name: str
    inputs: tuple[Operand | None, ...]
    output: Operand
    options: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A use of an operator; ``dtype`` is that of its activations."""

    name: str
    module: nn.Module
    shapes: tuple[tuple[int, ...], ...]
    call: Call
    dtype: str = "int8"


class Function(nn.Module):
    """Calls one function of its inputs."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function


class Unary(Function):
    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class Binary(Function):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.function(x, y)


def nhwc(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of PyTorch's images as TFLite has it."""
    return (shape[0], *shape[2:], shape[1]) if len(shape) > 2 else shape


def _one(module: nn.Module) -> nn.Module:
    """The module with equal weights, so that its quantized weights are all 127."""
    for parameter in module.parameters():
        nn.init.constant_(parameter, 0.5)
    return module.eval()


def _fits(size: int, kernel: int, step: int, spread: int, padding: int) -> bool:
    """Whether TFLite's SAME pads as much at each end as PyTorch's ``padding``."""
    if padding == 0:
        return True
    total = (-(-size // step) - 1) * step + spread * (kernel - 1) + 1 - size
    return total == 2 * padding


# -- weighted ----------------------------------------------------------------------------------------


def _weights(shape: tuple[int, ...], channels: int, axis: int = 0) -> tuple[Operand, Operand]:
    scales = (0.01,) * channels
    values = np.full(shape, 127, np.int8)
    bias = Operand((channels,), "int32", np.zeros(channels, np.int32), (0.0005,) * channels)
    return Operand(shape, "int8", values, scales, axis), bias


def _conv(
    size: int, kernel: int, step: int, spread: int, padding: int, *, channels: int = 4, out: int = 8
) -> Case:
    module = _one(nn.Conv2d(channels, out, kernel, step, padding, spread))
    shape = (1, channels, size, size)
    given = tuple(module(torch.zeros(shape)).shape)
    weight, bias = _weights((out, kernel, kernel, channels), out)
    fields = {
        "Padding": SAME if padding else VALID,
        "StrideW": step,
        "StrideH": step,
        "DilationWFactor": spread,
        "DilationHFactor": spread,
    }
    call = Call(
        "CONV_2D",
        (Operand(nhwc(shape)), weight, bias),
        Operand(nhwc(given)),
        "Conv2DOptions",
        fields,
    )
    name = f"conv2d k{kernel} s{step} d{spread} p{padding} c{channels} {size}"
    return Case(name, module, (shape,), call)


def convolutions() -> Iterator[Case]:
    for kernel, step, spread, pads in product((1, 3, 5), (1, 2, 3, 4, 5), (1, 2, 3), (False, True)):
        padding = spread * (kernel - 1) // 2 if pads else 0
        if pads and padding == 0:
            continue
        sizes = [s for s in range(18, 26) if _fits(s, kernel, step, spread, padding)]
        yield from (_conv(size, kernel, step, spread, padding) for size in sizes[:2])
    for channels in (63, 64, 65):  # 32 * 32 * 64 weights of 127
        yield _conv(34, 32, 1, 1, 0, channels=channels, out=2)


def depthwise() -> Iterator[Case]:
    for kernel, step, pads in product((1, 3, 5), (1, 2, 3, 4, 5), (False, True)):
        padding = (kernel - 1) // 2 if pads else 0
        if pads and not padding:
            continue
        for size in [s for s in range(16, 26) if _fits(s, kernel, step, 1, padding)][:2]:
            module = _one(nn.Conv2d(8, 8, kernel, step, padding, groups=8))
            shape = (1, 8, size, size)
            given = tuple(module(torch.zeros(shape)).shape)
            weight, bias = _weights((1, kernel, kernel, 8), 8, axis=3)
            fields = {"Padding": SAME if pads else VALID, "StrideW": step, "StrideH": step}
            fields |= {"DepthMultiplier": 1, "DilationWFactor": 1, "DilationHFactor": 1}
            operands = (Operand(nhwc(shape)), weight, bias)
            options = "DepthwiseConv2DOptions"
            call = Call("DEPTHWISE_CONV_2D", operands, Operand(nhwc(given)), options, fields)
            yield Case(f"depthwise k{kernel} s{step} p{padding} {size}", module, (shape,), call)


def transposed() -> Iterator[Case]:
    steps = [(1, 1), (2, 2), (1, 2), (2, 1), (3, 3), (4, 4), (2, 3)]
    for (high, wide), kernel, image in product(steps, ((1, 1), (2, 2), (3, 3), (1, 3)), (1, 6)):
        if kernel[0] < high or kernel[1] < wide:
            continue
        for channels in (4, 16):
            module = _one(nn.ConvTranspose2d(channels, 8, kernel, (high, wide)))
            shape = (1, channels, image, 6)
            given = nhwc(tuple(module(torch.zeros(shape)).shape))
            weight, bias = _weights((8, *kernel, channels), 8)
            size = Operand((4,), "int32", np.array(given, np.int32), ())
            operands = (size, weight, Operand(nhwc(shape)), bias)
            fields = {"Padding": VALID, "StrideW": wide, "StrideH": high}
            call = Call("TRANSPOSE_CONV", operands, Operand(given), "TransposeConvOptions", fields)
            name = f"transposed k{kernel} s{high, wide} c{channels} {image}"
            yield Case(name, module, (shape,), call)


def linears() -> Iterator[Case]:
    for features, rows, out in product((1, 16, 65535, 65536, 65537), (1, 2, 5), (1, 3)):
        module = _one(nn.Linear(features, out))
        weight, bias = _weights((out, features), out)
        operands = (Operand((rows, features)), weight, bias)
        call = Call("FULLY_CONNECTED", operands, Operand((rows, out)), "FullyConnectedOptions")
        yield Case(f"linear {features}x{out} {rows}", module, ((rows, features),), call)


# -- pooling -----------------------------------------------------------------------------------------


def pools() -> Iterator[Case]:
    small = product(((1, 1), (2, 2), (3, 3), (8, 8), (9, 9), (3, 9)), (1, 2, 3, 4), (False, True))
    large = product(((256, 256), (257, 1), (1, 257), (255, 257), (256, 257)), (1,), (False,))
    for (high, wide), step, pads in (*small, *large):
        for kind in ("max", "average"):
            found = _pool(kind, (high, wide), step, pads=pads)
            if found is not None:
                yield found


def _pool(kind: str, kernel: tuple[int, int], step: int, *, pads: bool) -> Case | None:
    padding = (kernel[0] // 2, kernel[1] // 2) if pads else (0, 0)
    if pads and not all(k % 2 or k == 8 for k in kernel):
        return None
    padding = tuple((k - 1) // 2 for k in kernel) if pads else (0, 0)
    sizes = [_size(k, step, p) for k, p in zip(kernel, padding, strict=True)]
    if None in sizes or (pads and padding == (0, 0)):
        return None
    shape = (1, 2, *sizes)
    cls = nn.MaxPool2d if kind == "max" else nn.AvgPool2d
    more = {} if kind == "max" else {"count_include_pad": False}
    module = cls(kernel, step, padding, **more)
    given = tuple(module(torch.zeros(shape)).shape)
    fields = {"Padding": SAME if pads else VALID, "StrideW": step, "StrideH": step}
    fields |= {"FilterWidth": kernel[1], "FilterHeight": kernel[0]}
    name = "MAX_POOL_2D" if kind == "max" else "AVERAGE_POOL_2D"
    call = Call(name, (Operand(nhwc(shape)),), Operand(nhwc(given)), "Pool2DOptions", fields)
    return Case(f"{kind} pool k{kernel} s{step} p{padding}", module, (shape,), call)


def _size(kernel: int, step: int, padding: int) -> int | None:
    start = max(kernel + 3, 12)
    return next((s for s in range(start, start + 9) if _fits(s, kernel, step, 1, padding)), None)
