"""Cases of operators without weights and windows: resizing, reductions, moves of values, dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import permutations, product
from typing import Any

import numpy as np
import torch
from tools.vela.cases import (
    Binary,
    Call,
    Case,
    Operand,
    Unary,
    convolutions,
    depthwise,
    linears,
    nhwc,
    pools,
    transposed,
)
from torch import nn
from torch.nn import functional as F

__all__ = ["all_cases"]

DTYPES = ("int8", "int16")


def resizes() -> Iterator[Case]:
    for factor, image in product((1, 2, 3, 4, 8, 16), ((1, 1), (5, 5), (1, 5), (6, 4))):
        size = tuple(side * factor for side in image)
        yield _resize("nearest", image, size)
        yield _resize("bilinear", image, size)
    for factor, side in product((2, 3, 4, 8, 9), (3, 5)):
        corners = (side - 1) * factor + 1
        yield _resize("bilinear", (side, side), (corners, corners), corners=True)
    for size in ((10, 20), (10, 5), (20, 10), (7, 7)):
        yield _resize("nearest", (5, 5), size)
        yield _resize("bilinear", (5, 5), size)


def _resize(
    mode: str, image: tuple[int, int], size: tuple[int, int], *, corners: bool = False
) -> Case:
    options: dict[str, Any] = {"mode": mode}
    options |= {"align_corners": corners} if mode == "bilinear" else {}
    module = nn.Upsample(size=size, **options)
    shape, given = (1, 4, *image), (1, *size, 4)
    constant = Operand((2,), "int32", np.array(size, np.int32), ())
    bilinear = mode == "bilinear"
    fields = {"AlignCorners": corners, "HalfPixelCenters": bilinear and not corners}
    name = "RESIZE_BILINEAR" if bilinear else "RESIZE_NEAREST_NEIGHBOR"
    table = "ResizeBilinearOptions" if bilinear else "ResizeNearestNeighborOptions"
    call = Call(name, (Operand(nhwc(shape)), constant), Operand(given), table, fields)
    return Case(f"{mode} {image} to {size} corners {corners}", module, (shape,), call)


def softmaxes() -> Iterator[Case]:
    for high, wide, dtype in product((1, 255, 256, 257), (1, 255, 256, 257), DTYPES):
        shape = (1, high, wide, 2)
        call = _plain("SOFTMAX", shape, dtype, "SoftmaxOptions", {"Beta": 1.0}, scales=(1 / 256,))
        yield Case(f"softmax {high}x{wide} {dtype}", nn.Softmax(dim=-1), (shape,), call, dtype)


def _plain(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    options: str = "",
    fields: dict[str, Any] | None = None,
    scales: tuple[float, ...] = (0.05,),
) -> Call:
    given = Operand(shape, dtype, scales=scales)
    return Call(name, (Operand(shape, dtype),), given, options, fields or {})


UNARY: dict[str, tuple[str, Callable[[], nn.Module], str]] = {
    "relu": ("RELU", nn.ReLU, ""),
    "relu6": ("RELU6", nn.ReLU6, ""),
    "sigmoid": ("LOGISTIC", nn.Sigmoid, ""),
    "tanh": ("TANH", nn.Tanh, ""),
    "hardswish": ("HARD_SWISH", nn.Hardswish, "HardSwishOptions"),
    "leaky relu": ("LEAKY_RELU", nn.LeakyReLU, "LeakyReluOptions"),
    "elu": ("ELU", nn.ELU, ""),
    "gelu": ("GELU", nn.GELU, "GeluOptions"),
    "exp": ("EXP", lambda: Unary(torch.exp), "ExpOptions"),
    "log": ("LOG", lambda: Unary(torch.log), ""),
    "rsqrt": ("RSQRT", lambda: Unary(torch.rsqrt), ""),
    "abs": ("ABS", lambda: Unary(torch.abs), "AbsOptions"),
    "neg": ("NEG", lambda: Unary(torch.neg), "NegOptions"),
}
BINARY: dict[str, tuple[str, Any, str]] = {
    "add": ("ADD", torch.add, "AddOptions"),
    "sub": ("SUB", torch.sub, "SubOptions"),
    "mul": ("MUL", torch.mul, "MulOptions"),
    "maximum": ("MAXIMUM", torch.maximum, "MaximumMinimumOptions"),
    "minimum": ("MINIMUM", torch.minimum, "MaximumMinimumOptions"),
}
SHAPES: tuple[tuple[int, ...], ...] = ((1, 4, 6, 8), (2, 4, 6, 8), (6, 8), (1, 2, 3, 4, 5))


def unaries() -> Iterator[Case]:
    for (name, (code, make, options)), dtype, shape in product(UNARY.items(), DTYPES, SHAPES):
        fields = {"Alpha": 0.01} if code == "LEAKY_RELU" else {}
        fixed = {"LOGISTIC": 1 / 256, "TANH": 1 / 128}.get(code, 0.05)
        scale = (1 / 32768,) if dtype == "int16" and code in ("LOGISTIC", "TANH") else (fixed,)
        call = _plain(code, shape, dtype, options, fields, scale)
        yield Case(f"{name} {dtype} {shape}", make(), (shape,), call, dtype)


def binaries() -> Iterator[Case]:
    others = (lambda s: s, lambda s: (*(1 for _ in s[:-1]), s[-1]), lambda s: (*s[:-1], 1))
    for (name, (code, op, options)), dtype, shape in product(BINARY.items(), DTYPES, SHAPES):
        for make in others:
            other = make(shape)
            operands = (Operand(shape, dtype), Operand(other, dtype))
            call = Call(code, operands, Operand(shape, dtype), options)
            yield Case(f"{name} {dtype} {shape} {other}", Binary(op), (shape, other), call, dtype)


def means() -> Iterator[Case]:
    images = [(1, 2, 4, 4), (2, 2, 4, 4), (1, 1, 4095, 2), (1, 1, 4096, 2), (1, 1, 2, 4096)]
    images += [(1, 1, 4097, 2), (1, 1, 2, 4097), (1, 1, 8192, 2)]
    images += [(1, 1, 256, 256), (1, 1, 257, 256), (1, 1, 256, 257), (1, 1, 2, 4095)]
    for shape, dtype in product(images, DTYPES):
        module = Unary(lambda x: torch.mean(x, (2, 3), keepdim=True))
        yield _mean(module, shape, (1, 2), dtype)
    deep = [(1, 4, 5, 6), (1, 4, 1, 6), (1, 4, 5, 1), (1, 1, 5, 6), (1, 4097, 1, 6)]
    for shape, dtype in product(deep, DTYPES):
        module = Unary(lambda x: torch.mean(x, 1, keepdim=True))
        yield _mean(module, shape, (3,), dtype)


def _mean(module: nn.Module, shape: tuple[int, ...], axes: tuple[int, ...], dtype: str) -> Case:
    tflite = nhwc(shape)
    given = tuple(1 if at in axes else side for at, side in enumerate(tflite))
    constant = Operand((len(axes),), "int32", np.array(axes, np.int32), ())
    operands = (Operand(tflite, dtype), constant)
    call = Call("MEAN", operands, Operand(given, dtype), "ReducerOptions", {"KeepDims": True})
    return Case(f"mean {shape} over {axes} {dtype}", module, (shape,), call, dtype)


def transposes() -> Iterator[Case]:
    shapes = ((2, 3, 4), (2, 70000, 3), (70000, 2, 3), (300, 300, 2))
    for shape, order, dtype in product(shapes, permutations(range(3)), DTYPES):
        if order != (0, 1, 2):
            yield _permuted(shape, order, dtype)
    for order in permutations(range(4)):
        if order != (0, 1, 2, 3):
            yield _permuted((2, 3, 4, 5), order, "int8")


def _permuted(shape: tuple[int, ...], order: tuple[int, ...], dtype: str) -> Case:
    given = tuple(shape[at] for at in order)
    constant = Operand((len(order),), "int32", np.array(order, np.int32), ())
    operands = (Operand(shape, dtype), constant)
    call = Call("TRANSPOSE", operands, Operand(given, dtype), "TransposeOptions")
    module = Unary(lambda x: torch.permute(x, order))
    return Case(f"permute {shape} by {order} {dtype}", module, (shape,), call, dtype)


def products() -> Iterator[Case]:
    for inner, wide, dtype in product((4, 65535, 65536, 65537), (2, 65536, 65537), DTYPES):
        if inner > 4 and wide > 2:
            continue
        left, right = (1, 2, inner), (1, inner, wide)
        operands = (Operand(left, dtype), Operand(right, dtype))
        given = Operand((1, 2, wide), dtype)
        call = Call("BATCH_MATMUL", operands, given, "BatchMatMulOptions")
        yield Case(
            f"matmul {left} {right} {dtype}", Binary(torch.matmul), (left, right), call, dtype
        )


def joins() -> Iterator[Case]:
    for shape, axis, dtype in product(SHAPES, (0, 1, -1), DTYPES):
        given = list(shape)
        given[axis] *= 2
        operands = (Operand(shape, dtype), Operand(shape, dtype))
        fields = {"Axis": axis % len(shape)}
        call = Call(
            "CONCATENATION", operands, Operand(tuple(given), dtype), "ConcatenationOptions", fields
        )
        module = Binary(lambda x, y, axis=axis: torch.cat([x, y], axis))
        yield Case(f"cat {shape} on {axis} {dtype}", module, (shape, shape), call, dtype)


def pads() -> Iterator[Case]:
    for sides, mode, dtype in product(
        ((1, 1, 1, 1), (0, 2, 3, 0)), ("constant", "reflect"), DTYPES
    ):
        shape = (1, 2, 6, 6)
        left, right, top, bottom = sides
        given = (1, 6 + top + bottom, 6 + left + right, 2)
        table = np.array([[0, 0], [top, bottom], [left, right], [0, 0]], np.int32)
        operands = (Operand(nhwc(shape), dtype), Operand((4, 2), "int32", table, ()))
        name, options = ("PAD", "PadOptions") if mode == "constant" else ("MIRROR_PAD", "")
        options = options or "MirrorPadOptions"
        call = Call(name, operands, Operand(given, dtype), options)
        module = Unary(lambda x, s=sides, m=mode: F.pad(x, s, m))
        yield Case(f"pad {sides} {mode} {dtype}", module, (shape,), call, dtype)


def all_cases() -> list[Case]:
    """Every case, in one order."""
    families = (convolutions, depthwise, transposed, linears, pools, resizes, softmaxes, unaries)
    families += (binaries, means, transposes, products, joins, pads)
    return [case for family in families for case in family()]
