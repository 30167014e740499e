"""Models by family: a beginning, which gives the family its name, and up to four steps behind it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from generated.values import drawn

__all__ = ["FAMILIES", "Drawn", "draw"]

_WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 16)
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Drawn:
    """``shape``: of the input, whose first axis is the batch. ``ids``: the input holds integers
    below that."""

    model: nn.Module
    shape: Shape
    ids: int = 0
    steps: list[str] = field(default_factory=list)

    def input(self, choice: random.Random, batch: int) -> torch.Tensor:
        shape = (batch, *self.shape[1:])
        if not self.ids:
            return drawn(shape, choice)
        generator = torch.Generator().manual_seed(choice.randrange(1 << 30))
        return torch.randint(self.ids, shape, generator=generator)


class Chain(nn.Module):
    """One step behind the other, under numbers or under these names."""

    def __init__(self, steps: list[nn.Module], names: Sequence[str] = ()) -> None:
        super().__init__()
        named = dict(zip(names, steps, strict=False))
        self.steps = nn.ModuleDict(named) if named else nn.ModuleList(steps)

    def forward(self, x: Any) -> Any:
        for step in self.steps.values() if isinstance(self.steps, nn.ModuleDict) else self.steps:
            x = step(x)
        return x


class Held(nn.Module):
    """A buffer as a factor and a part of a longer one as a term: state, not weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("factor", torch.rand(width) + 0.5)
        self.register_buffer("table", torch.randn(width + 3))

    def forward(self, x: Any) -> Any:
        return x * self.factor + self.table[: x.shape[-1]]


class Call(nn.Module):
    """A function of one value; ``name`` says which."""

    def __init__(self, name: str, call: Callable[[Any], Any]) -> None:
        super().__init__()
        self.name, self.call = name, call

    def forward(self, x: Any) -> Any:
        return self.call(x)

    def extra_repr(self) -> str:
        return self.name


class Beside(nn.Module):
    """A step and its input, joined."""

    def __init__(self, step: nn.Module, join: str) -> None:
        super().__init__()
        self.step, self.join = step, join

    def forward(self, x: Any) -> Any:
        y = self.step(x)
        if self.join == "add":
            return x + y
        if self.join == "add relu":
            return torch.relu(y + x)
        if self.join == "mul":
            return x * y
        return torch.cat([x, y], 1)


class First(nn.Module):
    """A recurrent layer's sequence, without its state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(x)[0]


class Cell(nn.Module):
    """A recurrent cell, two steps on the same input."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Any) -> Any:
        state = self.cell(x)
        state = self.cell(x, state)
        return state[0] if isinstance(self.cell, nn.LSTMCell) else state


class Attention(nn.Module):
    """Heads written out, or by ``scaled_dot_product_attention``."""

    def __init__(self, width: int, heads: int, written: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads, self.written = heads, written

    def forward(self, x: Any) -> Any:
        parts = self.qkv(x).chunk(3, dim=-1)
        heads = [parts[i].unflatten(-1, (self.heads, -1)).transpose(1, 2) for i in range(3)]
        q, k, v = heads
        if self.written:
            scores = torch.matmul(q, k.transpose(-2, -1)) * q.shape[-1] ** -0.5
            mixed = torch.matmul(torch.softmax(scores, -1), v)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(2))


class SelfAttention(nn.Module):
    """PyTorch's layer on one input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.layer(x, x, x, need_weights=False)[0]


class Halves(nn.Module):
    """Two parts of a value, one through an activation, joined again."""

    def __init__(self, way: str, dim: int) -> None:
        super().__init__()
        self.way, self.dim = way, dim

    def forward(self, x: Any) -> Any:
        if self.way == "chunk":
            parts = torch.chunk(x, 2, self.dim)
        elif self.way == "split":
            parts = x.split(x.shape[self.dim] // 2, self.dim)
        elif self.way == "tensor_split":
            parts = torch.tensor_split(x, 2, self.dim)
        else:
            parts = x.unbind(self.dim)
            return torch.stack([parts[0].relu(), parts[-1]], self.dim)
        a, b = parts[0], parts[1]
        if self.way == "chunk":
            return torch.cat([torch.sigmoid(b), a], self.dim)
        return torch.cat([b, a, torch.relu(a)], self.dim)


_ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, nn.Hardswish, nn.GELU, lambda: nn.GELU("tanh"), nn.Softplus, nn.Sigmoid, nn.Tanh,
    nn.Hardsigmoid, nn.SiLU, nn.ELU, lambda: nn.LeakyReLU(0.1), nn.PReLU, nn.Mish, nn.Hardtanh, nn.SELU,
    lambda: nn.Softmax(-1), lambda: nn.LogSoftmax(-1),
)  # fmt: skip
_CALLS: dict[str, Callable[[Any], Any]] = {
    "softplus": F.softplus, "hardswish": F.hardswish, "gelu": F.gelu, "relu": torch.relu,
    "+ 1": lambda x: x + 1, "* 3": lambda x: x * 3.0, "/ 3": lambda x: x / 3,
    "- mean": lambda x: x - x.mean(-1, True),
    "x + x": lambda x: x + x, "x * x": lambda x: x * x, "clamp": lambda x: x.clamp(-0.5, 1.5),
    "neg": lambda x: -x,
    "abs": lambda x: x.abs(), "exp": lambda x: (x.clamp(max=5)).exp(),
}  # fmt: skip
#: Sizes of the input in arithmetic, the number of samples among them.
_COUNTS: dict[str, Callable[[Any], Any]] = {
    "* samples": lambda x: x * x.shape[0] - 0.1,
    "/ elements": lambda x: x / x.numel() * 64,
    "+ len": lambda x: torch.relu(x + len(x) * 0.25),
    "mean * size": lambda x: torch.relu(x.mean(-1, keepdim=True) * x.size(-1) - 0.1),
    "flat by shape": lambda x: x.reshape(x.shape[0], x.numel() // x.shape[0]),
}
#: Several results of the same factors.
_PRODUCTS: dict[str, Callable[[Any], Any]] = {
    "with its transpose": lambda y: torch.cat([y, (y @ y.mT) @ y], -1),
    "both ways": lambda y: torch.cat([(y @ y.mT).flatten(1), (y.mT @ y).flatten(1)], 1),
    "with its half": lambda y: torch.cat([y * y[..., :1], y * y[..., -1:]], -1),
}
_ODD_NAMES = ("in", "µ", "μ", "class", "a b", "3x3", "＿x", "é", "it's", 'q"t', "weight", "0")
_MOVES: dict[str, Callable[[Any], Any]] = {
    "flatten": lambda x: torch.flatten(x, 1),
    "transpose": lambda x: x.transpose(1, -1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "slice": lambda x: x[:, 1:],
    "every other": lambda x: x[..., ::2],
    "repeat": lambda x: x.repeat_interleave(2, 1),
    "flip": lambda x: x.flip(-1),
    "cat itself": lambda x: torch.cat([x, x], 1),
    "pad": lambda x: F.pad(x, (1, 2)),
    "roll": lambda x: torch.roll(x, 1, -1),
    "expand": lambda x: x.unsqueeze(-1).expand_as(torch.stack([x, x], -1)).flatten(-2),
}


def _conv(choice: random.Random, shape: Shape) -> nn.Module:
    dims = len(shape) - 2
    channels = shape[1]
    kind = choice.choice(("dense", "dense", "depthwise", "grouped", "point"))
    groups, out = 1, choice.choice(_WIDTHS)
    if kind == "depthwise":
        groups, out = channels, channels * choice.choice((1, 1, 2))
    elif kind == "grouped":
        groups = choice.choice([g for g in (1, 2, 3) if channels % g == 0])
        out = groups * choice.choice((1, 2, 3, 5))
    kernel = 1 if kind == "point" else choice.choice((1, 2, 3, 3))
    dilation = choice.choice((1, 1, 1, 2))
    mode = choice.choice(("zeros", "zeros", "zeros", "zeros", "reflect", "replicate", "circular"))
    cls = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return cls(
        channels, out, kernel, choice.choice((1, 1, 2)), choice.choice((0, 1, 2)), dilation, groups,
        choice.random() < 0.7, mode,
    )  # fmt: skip


def _transposed(choice: random.Random, shape: Shape) -> nn.Module:
    dims = len(shape) - 2
    groups = choice.choice([g for g in (1, 1, 2, 3) if shape[1] % g == 0])
    stride = choice.choice((1, 2, 3))
    cls = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    return cls(
        shape[1], groups * choice.choice((1, 2, 3, 4)), choice.choice((1, 2, 3, 4)), stride,
        choice.choice((0, 0, 1)), choice.randrange(stride), groups, choice.random() < 0.7,
        choice.choice((1, 1, 2)),
    )  # fmt: skip


def _linear(choice: random.Random, shape: Shape) -> nn.Module:
    return nn.Linear(shape[-1], choice.choice(_WIDTHS), choice.random() < 0.8)


def _norm(choice: random.Random, shape: Shape) -> nn.Module:
    rank, channels = len(shape), shape[1]
    kind = choice.choice(("layer", "layer", "group", "batch", "instance"))
    if kind == "layer" or rank < 3:
        axes = choice.randint(1, rank - 1)
        return nn.LayerNorm(shape[-axes:], elementwise_affine=choice.random() < 0.7)
    if kind == "group":
        groups = choice.choice([g for g in (1, 2, 3, channels) if channels % g == 0])
        return nn.GroupNorm(groups, channels, affine=choice.random() < 0.7)
    of = {
        "batch": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        "instance": (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
    }[kind]
    return of[rank - 3](channels, affine=True)


def _pool(choice: random.Random, shape: Shape) -> nn.Module:
    dims = len(shape) - 2
    of = {
        "max": (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
        "avg": (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        "adaptive": (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        "adaptive max": (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
    }
    kind = choice.choice(("max", "avg", "adaptive", "adaptive", "adaptive max"))
    if kind.startswith("adaptive"):
        return of[kind][dims - 1](choice.choice((1, 1, 2, 3)))
    kernel = choice.choice((1, 2, 3))
    padding, ceil = choice.choice((0, kernel // 2)), choice.random() < 0.2
    if kind == "avg" and choice.random() < 0.3:
        return nn.AvgPool1d(kernel, 1, padding, ceil, False) if dims == 1 else of[kind][dims - 1](
            kernel, 1, padding, ceil, False
        )  # fmt: skip
    return of[kind][dims - 1](kernel, choice.choice((1, 2)), padding, ceil_mode=ceil)


def _mean(choice: random.Random, shape: Shape) -> nn.Module:
    dims = tuple(choice.sample(range(1, len(shape)), choice.randint(1, len(shape) - 1)))
    keep = choice.random() < 0.5
    return Call(f"mean({dims}, {keep})", lambda x: x.mean(dims, keep))


def _activation(choice: random.Random, _: Shape) -> nn.Module:
    if choice.random() < 0.7:
        return choice.choice(_ACTIVATIONS)()
    name = choice.choice(list(_CALLS))
    return Call(name, _CALLS[name])


def _move(choice: random.Random, shape: Shape) -> nn.Module:
    if choice.random() < 0.5:
        way = choice.choice(("chunk", "split", "tensor_split", "unbind"))
        return Halves(way, choice.randrange(1, len(shape)))
    name = choice.choice(list(_MOVES))
    return Call(name, _MOVES[name])


def _counted(choice: random.Random, _: Shape) -> nn.Module:
    name = choice.choice(list(_COUNTS))
    return Call(name, _COUNTS[name])


def _product(choice: random.Random, _: Shape) -> nn.Module:
    name = choice.choice(list(_PRODUCTS))
    return Call(name, _PRODUCTS[name])


def _held(_: random.Random, shape: Shape) -> nn.Module:
    return Held(shape[-1])


def _resize(choice: random.Random, shape: Shape) -> nn.Module:
    modes = {3: ("nearest", "linear"), 4: ("nearest", "bilinear", "bicubic"), 5: ("nearest",)}
    mode = choice.choice(modes[len(shape)])
    return nn.Upsample(scale_factor=choice.choice((1, 2, 1.5)), mode=mode)


def _attention(choice: random.Random, shape: Shape) -> nn.Module:
    width = shape[-1]
    heads = choice.choice([h for h in (1, 2, 3) if width % h == 0])
    way = choice.random()
    if way < 0.06:
        return SelfAttention(width, heads)
    if way < 0.08:
        return nn.TransformerEncoderLayer(
            width, heads, 2 * width, batch_first=True, activation=choice.choice((F.relu, F.gelu))
        )
    return Attention(width, heads, choice.random() < 0.6)


def _recurrent(choice: random.Random, shape: Shape) -> nn.Module:
    width, hidden = shape[-1], choice.choice((1, 3, 4, 8))
    if len(shape) == 2:
        return Cell(choice.choice((nn.LSTMCell, nn.GRUCell, nn.RNNCell))(width, hidden))
    cls = choice.choice((nn.LSTM, nn.LSTM, nn.GRU))
    return First(
        cls(width, hidden, choice.choice((1, 1, 2)), batch_first=choice.random() < 0.7,
            bidirectional=choice.random() < 0.3, bias=choice.random() < 0.8)
    )  # fmt: skip


Make = Callable[[random.Random, Shape], nn.Module]
_IMAGES, _ALL = (3, 4, 5), (2, 3, 4, 5)
_BEHIND: tuple[tuple[Make, tuple[int, ...], int], ...] = (
    (_activation, _ALL, 6),
    (_conv, _IMAGES, 3),
    (_linear, _ALL, 3),
    (_norm, _ALL, 2),
    (_pool, _IMAGES, 3),
    (_mean, (3, 4, 5), 1),
    (_move, _ALL, 3),
    (_transposed, (3, 4), 1),
    (_resize, (3, 4), 1),
    (_counted, _ALL, 1),
    (_product, (3, 4), 1),
    (_held, _ALL, 1),
)


def _shape(choice: random.Random, ranks: tuple[int, ...]) -> Shape:
    rank = choice.choice(ranks)
    sizes = {2: (), 3: (1, 2, 5, 8, 11), 4: (1, 2, 4, 5, 6, 7), 5: (1, 2, 3, 4)}[rank]
    last = tuple(choice.choice(sizes) for _ in range(rank - 2))
    return (choice.choice((1, 2, 2, 3)), choice.choice(_WIDTHS), *last)


FAMILIES: dict[str, tuple[Make, tuple[int, ...]]] = {
    "conv": (_conv, (3, 4, 4, 4, 5)),
    "transposed": (_transposed, (3, 4, 4, 5)),
    "linear": (_linear, (2, 2, 3, 4)),
    "norm": (_norm, (2, 3, 4, 5)),
    "attention": (_attention, (3,)),
    "recurrent": (_recurrent, (2, 3, 3)),
    "pooling": (_pool, (3, 4, 4, 5)),
    "activation": (_activation, (2, 3, 4)),
    "moves": (_move, (2, 3, 4)),
    "embedding": (_linear, (2,)),
}


def _embedding(choice: random.Random) -> tuple[nn.Module, Shape, int]:
    rows, width = choice.choice((1, 3, 10)), choice.choice(_WIDTHS)
    shape = (choice.choice((1, 2, 3)), choice.choice((1, 3, 5)))
    if choice.random() < 0.4:
        return nn.EmbeddingBag(rows, width, mode=choice.choice(("sum", "mean"))), shape, rows
    return nn.Embedding(rows, width), shape, rows


def _settled(module: nn.Module, choice: random.Random) -> nn.Module:
    for part in module.modules():
        if isinstance(part, (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)):
            for name, value in (*part.named_parameters(), *part.named_buffers()):
                if value.is_floating_point():
                    value.data.uniform_(0.5, 2.0) if name != "bias" else value.data.normal_()
    return module.eval()


def _fits(step: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    try:
        y = step(x)
    except (RuntimeError, ValueError, IndexError):
        return None
    usable = y.dim() in _ALL and 0 < y.numel() < 3000 and y.shape[0] == x.shape[0]
    return y if usable and bool(y.isfinite().all()) else None


def draw(family: str, choice: random.Random) -> Drawn:
    """A model of ``family``."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(choice.randrange(1 << 30))
        for _ in range(50):
            made = _attempt(family, choice)
            if made is not None:
                return made
    raise AssertionError(f"no model of {family}")


def _attempt(family: str, choice: random.Random) -> Drawn | None:
    ids = 0
    if family == "embedding":
        begin, shape, ids = _embedding(choice)
        x: torch.Tensor = torch.randint(ids, shape)
    else:
        make, ranks = FAMILIES[family]
        shape = _shape(choice, ranks)
        begin, x = make(choice, shape), torch.randn(shape)
    begin = _settled(begin, choice)
    value = _fits(begin, x)
    if value is None:
        return None
    steps = [begin]
    for _ in range(choice.choice((0, 1, 1, 2, 2, 3, 4))):
        step, value = _behind(choice, value)
        steps.append(step)
    names = choice.sample(_ODD_NAMES, len(steps)) if choice.random() < 0.2 else ()
    return Drawn(Chain(steps, names).eval(), shape, ids, [type(s).__name__ for s in steps])


def _behind(choice: random.Random, value: torch.Tensor) -> tuple[nn.Module, torch.Tensor]:
    while True:
        fitting = [(make, weight) for make, ranks, weight in _BEHIND if value.dim() in ranks]
        make = choice.choices([m for m, _ in fitting], [w for _, w in fitting])[0]
        try:
            step = _settled(make(choice, tuple(value.shape)), choice)
        except (ValueError, RuntimeError):
            continue
        if choice.random() < 0.15:
            step = Beside(step, choice.choice(("add", "add relu", "mul", "cat")))
        found = _fits(step, value)
        if found is not None:
            return step, found
