"""Cases of operators without a weight: pooling, arithmetic, resizing, norms, tables, moves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.dtypes import QParams
from kernel_audit.case import Case, drawn_qparams, fitting

__all__ = ["FAMILIES"]

_WIDTHS = (1, 2, 3, 7, 8, 16, 17, 24, 31, 32, 33, 64, 65, 100)
_BATCHES = (0, 1, 1, 2, 3)
_DTYPES = (torch.uint8, torch.uint8, torch.uint8, torch.int8)


def _image(
    choice: random.Random, dims: int = 2, least: int = 1, batched: bool = False
) -> tuple[int, ...]:
    largest = {1: 40, 2: 14, 3: 7}[dims]
    size = tuple(choice.randint(least, max(least, largest)) for _ in range(dims))
    shape = (choice.choice(_BATCHES), choice.choice(_WIDTHS), *size)
    return shape[1:] if not batched and choice.random() < 0.1 else shape


def _case(
    choice: random.Random, family: str, label: str, operator: Any, shapes: list[Any], **rest: Any
) -> Case:
    """A case whose result has the qparams of its input."""
    qparams = drawn_qparams(choice, choice.choice(_DTYPES))
    inputs = (qparams,) * len(shapes[0])
    return Case(family, label, operator, shapes, inputs, qparams, **rest)


def _computed(choice: random.Random, case: Case) -> Case:
    """``case`` with qparams of its own for each input and for the result."""
    dtype = case.qparams[0].dtype
    case.qparams = tuple(drawn_qparams(choice, dtype) for _ in case.qparams)
    holder = nn.Module()
    for name, child in case.children.items():
        holder.add_module(name, child)
    inputs = []
    for shape, q in zip(case.shapes[0], case.qparams, strict=True):
        some = torch.randint(q.quant_min, q.quant_max + 1, tuple(max(n, 1) for n in shape))
        inputs.append((some.float() - q.zero_point) * q.scale)
    with torch.no_grad():
        case.out = fitting(case.operator(holder, *inputs), choice, dtype)
    return case


def _function(name: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(F, name)
    return found


def max_pool(choice: random.Random) -> Case:
    dims = choice.choice((1, 2, 2, 2, 3))
    kernel = [choice.choice((1, 2, 3, 3, 5)) for _ in range(dims)]
    stride = [choice.choice((1, 2, 2, 3)) for _ in range(dims)]
    padding = [choice.randint(0, k // 2) for k in kernel]
    dilation = [choice.choice((1, 1, 1, 2)) for _ in range(dims)]
    ceil = choice.random() < 0.4
    least = max(d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True))
    pool = _function(f"max_pool{dims}d")
    return _case(
        choice,
        "max_pool",
        f"max_pool{dims}d({kernel}, {stride}, {padding}, {dilation}, ceil_mode={ceil})",
        lambda self, x: pool(x, kernel, stride, padding, dilation, ceil),
        [(_image(choice, dims, least),) for _ in range(4)],
        exact=True,
    )


def avg_pool(choice: random.Random) -> Case:
    dims = choice.choice((1, 2, 2, 2, 3))
    kernel = [choice.choice((1, 2, 3, 5)) for _ in range(dims)]
    stride = [choice.choice((1, 2, 3)) for _ in range(dims)]
    padding = [choice.randint(0, k // 2) for k in kernel]
    ceil, include = choice.random() < 0.4, choice.random() < 0.5
    rest = [choice.choice((None, None, 3))] if dims > 1 else []
    pool = _function(f"avg_pool{dims}d")
    return _case(
        choice,
        "avg_pool",
        f"avg_pool{dims}d({kernel}, {stride}, {padding}, {ceil}, {include}, {rest})",
        lambda self, x: pool(x, kernel, stride, padding, ceil, include, *rest),
        [(_image(choice, dims, max(kernel)),) for _ in range(4)],
    )


def adaptive_pool(choice: random.Random) -> Case:
    dims = choice.choice((1, 2, 2, 2, 3))
    size: Any = tuple(choice.choice((1, 1, 2, 3, 7)) for _ in range(dims))
    if dims > 1 and choice.random() < 0.2:
        size = (None, *size[1:])
    if choice.random() < 0.3:
        size = 1
    pool = _function(f"adaptive_avg_pool{dims}d")
    return _case(
        choice,
        "adaptive_pool",
        f"adaptive_avg_pool{dims}d({size})",
        lambda self, x: pool(x, size),
        [(_image(choice, dims),) for _ in range(4)],
    )


def mean(choice: random.Random) -> Case:
    keep = choice.random() < 0.5
    rank = choice.randint(1, 5)
    dims = choice.sample(range(rank), choice.randint(1, rank))
    dims = [d - rank if choice.random() < 0.5 else d for d in dims]
    dim: Any = dims[0] if len(dims) == 1 and choice.random() < 0.5 else dims
    shapes = [
        (tuple(choice.choice((1, 2, 3, 5, 8, 16, 33)) for _ in range(rank)),) for _ in range(4)
    ]
    others = [d % rank for d in dims]
    free = [d for d in range(rank) if d not in others]
    if free:
        empty = list(shapes[1][0])
        empty[free[0]] = 0
        shapes.append((tuple(empty),))
    return _case(choice, "mean", f"mean({dim}, {keep})", lambda self, x: x.mean(dim, keep), shapes)


def binary(choice: random.Random) -> Case:
    add, relu = choice.random() < 0.5, choice.random() < 0.4
    shapes = []
    for _ in range(4):
        rank = choice.randint(0, 5)
        shape = tuple(choice.choice((1, 2, 3, 7, 16, 33)) for _ in range(rank))
        if choice.random() < 0.1 and rank:
            shape = (0, *shape[1:])
        other = shape
        if choice.random() < 0.6:
            other = tuple(choice.choice((n, n, 1)) for n in shape)[choice.randint(0, rank) :]
        pair = (shape, other)
        shapes.append(pair if choice.random() < 0.7 else pair[::-1])

    def run(self: Any, x: Any, y: Any) -> Any:
        value = x + y if add else x * y
        return torch.relu(value) if relu else value

    label = f"{'add' if add else 'mul'}{'+relu' if relu else ''}"
    return _computed(choice, _case(choice, "binary", label, run, shapes))


def norm(choice: random.Random) -> Case:
    kind = choice.choice(("batch", "batch", "layer", "group", "instance"))
    dims = choice.choice((1, 2, 3))
    channels = choice.choice((2, 4, 6, 8, 12, 32, 34))
    affine = choice.random() < 0.7
    module: nn.Module
    lowest = 2 if kind == "instance" else 1
    shapes: list[Any] = []
    for _ in range(3):
        size = tuple(choice.randint(lowest, 9) for _ in range(dims))
        shapes.append(((choice.choice(_BATCHES), channels, *size),))
    if kind == "batch":
        module = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](channels)
        module.running_mean.normal_()
        module.running_var.uniform_(0.2, 3)
        if dims == 1 and choice.random() < 0.5:
            shapes = [(shape[:2],) for (shape,) in shapes]
    elif kind == "layer":
        size = tuple(choice.randint(2, 9) for _ in range(choice.choice((1, 1, 2))))
        module = nn.LayerNorm(size, elementwise_affine=affine)
        shapes = [
            (tuple(choice.choice((1, 2, 3, 5)) for _ in range(choice.randint(0, 3))) + size,)
            for _ in range(4)
        ]
        shapes.append(((0, *size),))
    elif kind == "group":
        module = nn.GroupNorm(2, channels, affine=affine)
    else:
        module = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1](
            channels, affine=affine
        )
    for name, parameter in module.named_parameters():
        parameter.data.normal_(1.0 if name == "weight" else 0.0, 0.5)
    relu = kind == "batch" and choice.random() < 0.4

    def run(self: Any, x: Any) -> Any:
        value = self.op(x)
        return torch.relu(value) if relu else value

    label = f"{module}{' relu' if relu else ''}"
    made = _case(choice, "norm", label, run, shapes, children={"op": module.eval()})
    return _computed(choice, made)


def matrix(choice: random.Random) -> Case:
    if choice.random() < 0.4:
        rank = choice.randint(1, 5)
        dim = choice.randrange(-rank, rank)
        shapes: list[Any] = [
            (tuple(choice.choice((1, 2, 3, 7, 17, 40)) for _ in range(rank)),) for _ in range(4)
        ]
        empty = list(shapes[0][0])
        empty[(dim + 1) % rank] = 0
        if rank > 1:
            shapes.append((tuple(empty),))
        made = _case(
            choice, "matrix", f"softmax({dim})", lambda self, x: torch.softmax(x, dim), shapes
        )
        dtype = made.qparams[0].dtype
        made.qparams = (drawn_qparams(choice, dtype),)
        made.out = QParams(1 / 256, torch.iinfo(dtype).min, *_ends(dtype), dtype)
        return made
    shapes = []
    for _ in range(4):
        a, b, c = (choice.choice((1, 2, 3, 7, 16, 33)) for _ in range(3))
        rank = choice.randint(0, 3)
        lead = tuple(choice.choice((1, 2, 3)) for _ in range(rank))
        left, right = (*lead, a, b), (*lead, b, c)
        way = choice.random()
        if way < 0.2:
            right = (b, c)
        elif way < 0.3:
            left = (b,)
        elif way < 0.4:
            right = (b,)
        elif way < 0.5 and rank:
            right = (1, *right[1:])
        elif way < 0.6 and rank:
            left, right = (0, *left[1:]), (0, *right[1:])
        shapes.append((left, right))
    run = lambda self, x, y: torch.matmul(x, y)  # noqa: E731
    return _computed(choice, _case(choice, "matrix", "matmul", run, shapes))


def _ends(dtype: torch.dtype) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    return info.min, info.max


def resize(choice: random.Random) -> Case:
    mode = choice.choice(("nearest", "nearest-exact", "bilinear", "bilinear", "bilinear"))
    dims = 2 if mode == "bilinear" else choice.choice((1, 2, 2, 3))
    align = choice.choice((None, False, True)) if mode == "bilinear" else None
    kwargs: dict[str, Any] = {"mode": mode}
    if mode == "bilinear":
        kwargs["align_corners"] = align
    first = _image(choice, dims, 2, batched=True)
    way = choice.choice(("same", "size", "factor"))
    if way == "factor":
        kwargs["scale_factor"] = choice.choice((0.5, 1.0, 1.5, 2.0, 2.7))
        if choice.random() < 0.3:
            kwargs["recompute_scale_factor"] = True
    else:
        same = first[2:]
        kwargs["size"] = same if way == "same" else tuple(choice.randint(1, 15) for _ in same)
    shapes: list[Any] = [(first,), ((choice.choice(_BATCHES), *first[1:]),)]
    shapes += [(_image(choice, dims, 2, batched=True),) for _ in range(2)]
    exact = mode != "bilinear"
    label = f"interpolate({kwargs})"
    return _case(
        choice, "resize", label, lambda self, x: F.interpolate(x, **kwargs), shapes, exact=exact
    )


def pad(choice: random.Random) -> Case:
    dims = choice.choice((1, 2, 2, 3))
    mode = choice.choice(("constant", "constant", "reflect", "replicate", "circular"))
    least = 3
    padding = [choice.choice((0, 1, 2)) for _ in range(2 * dims)]
    args: tuple[Any, ...] = (padding, mode)
    if mode == "constant":
        padding = [choice.choice((-1, 0, 1, 2)) for _ in range(2 * dims)]
        args = (padding, mode, choice.choice((0.0, 0.0, 1.7)))
    shapes = [(_image(choice, dims, least, batched=True),) for _ in range(3)]
    return _case(choice, "pad", f"pad{args}", lambda self, x: F.pad(x, *args), shapes, exact=True)


_TABLES: dict[str, Callable[[Any], Any]] = {
    "sigmoid": torch.sigmoid, "tanh": torch.tanh, "hardswish": F.hardswish, "silu": F.silu,
    "gelu": F.gelu, "leaky_relu": F.leaky_relu, "elu": F.elu, "hardsigmoid": F.hardsigmoid,
    "relu": torch.relu, "relu6": F.relu6, "clamp": lambda x: torch.clamp(x, -0.3, 0.4),
    "x + 1": lambda x: x + 1.0, "2 * x": lambda x: 2.0 * x, "abs": torch.abs, "x ** 2": lambda x: x**2,
}  # fmt: skip


def table(choice: random.Random) -> Case:
    """Functions of one value, and clamps."""
    name = choice.choice(list(_TABLES))
    shapes: list[Any] = [(_image(choice, choice.choice((1, 2, 3))),) for _ in range(3)]
    shapes += [((),), ((0,),), ((choice.choice(_WIDTHS),),)]
    made = _case(choice, "table", name, lambda self, x: _TABLES[name](x), shapes)
    return _computed(choice, made) if choice.random() < 0.7 else made


_MOVES: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "flatten": ((2, 3, 4, 5), lambda x: torch.flatten(x, 1)),
    "reshape": ((2, 6, 4, 5), lambda x: x.reshape(x.shape[0], -1, 3)),
    "view": ((2, 6, 4, 5), lambda x: x.view(2, 12, 10)),
    "permute": ((2, 3, 4, 5), lambda x: x.permute(0, 3, 1, 2)),
    "transpose": ((2, 3, 4), lambda x: x.transpose(-1, 1)),
    "squeeze": ((2, 1, 4, 1), lambda x: x.squeeze()),
    "unsqueeze": ((2, 3), lambda x: x.unsqueeze(-1)),
    "getitem": ((4, 6, 5, 5), lambda x: x[1:, ::2, None, ..., -1]),
    "narrow": ((4, 6, 5), lambda x: x.narrow(1, 2, 3)),
    "expand": ((4, 1, 5), lambda x: x.expand(-1, 3, -1)),
    "repeat": ((2, 3), lambda x: x.repeat(2, 1, 2)),
    "repeat_interleave": ((2, 3, 4), lambda x: x.repeat_interleave(2, 1)),
    "flip": ((2, 3, 4), lambda x: x.flip(1)),
    "roll": ((2, 3, 4), lambda x: torch.roll(x, 1, 2)),
    "pixel_shuffle": ((2, 8, 3, 5), lambda x: F.pixel_shuffle(x, 2)),
    "pixel_unshuffle": ((2, 3, 4, 6), lambda x: F.pixel_unshuffle(x, 2)),
    "channel_shuffle": ((2, 6, 4, 5), lambda x: F.channel_shuffle(x, 3)),
    "shuffle": ((2, 6, 4, 5), lambda x: x.reshape(2, 2, 3, 4, 5).transpose(1, 2).reshape(2, 6, 4, 5)),
    "chunk": ((2, 6, 4), lambda x: x.chunk(3, -2)[1]),
    "split": ((2, 7, 4), lambda x: x.split(3, 1)[2]),
    "unbind": ((2, 3, 4), lambda x: x.unbind(1)[1]),
    "cat": ((2, 3, 4), lambda x: torch.cat([x, x], -2)),
    "stack": ((2, 3, 4), lambda x: torch.stack([x, x], -1)),
}  # fmt: skip


def move(choice: random.Random) -> Case:
    name = choice.choice(list(_MOVES))
    shape, run = _MOVES[name]
    return _case(choice, "move", name, lambda self, x: run(x), [(shape,), (shape,)], exact=True)


def cat(choice: random.Random) -> Case:
    """Parts with qparams of their own."""
    rank = choice.randint(1, 5)
    dim = choice.randrange(-rank, rank)
    shapes = []
    for _ in range(3):
        size = [choice.choice((1, 2, 3, 8)) for _ in range(rank)]
        parts = []
        for _ in range(3):
            part = list(size)
            part[dim] = choice.choice((0, 1, 2, 5))
            parts.append(tuple(part))
        shapes.append(tuple(parts))
    run = lambda self, x, y, z: torch.cat([x, y, z], dim)  # noqa: E731
    made = _case(choice, "cat", f"cat({dim})", run, shapes)
    return _computed(choice, made)


FAMILIES = {
    "max_pool": max_pool, "avg_pool": avg_pool, "adaptive_pool": adaptive_pool, "mean": mean,
    "binary": binary, "norm": norm, "matrix": matrix, "resize": resize, "pad": pad, "table": table,
    "move": move, "cat": cat,
}  # fmt: skip
