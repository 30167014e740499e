"""Before the library is used, its kernels compute a few layers, which are compared with exact integer
arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from backquant.native.epilogue import Result
from backquant.native.packing import Layout
from backquant.native.plan import Shape, plan

_FLOAT = Result(1.0, 0, torch.float32, "none", (), "")
_RELU = Result(0.05, 3, torch.uint8, "relu", (), "")
_SWISH = Result(0.02, 11, torch.uint8, "swish", (), "")
_SIX = Result(0.04, 5, torch.uint8, "hardtanh", (0.0, 6.0), "")
_X = (0.02, 117)
_OTHER = (0.03, 90)
# of a step of the result: what is rounded to 16 bits, and an approximate exponential
_CLOSE_ATTENTION = 0.05
_CLOSE = 2e-3  # of a step of the result, and of the largest float, what the order of operations may decide


@dataclass(frozen=True)
class PlainWeights:
    """The weights of a layer. ``folded`` rounds well enough for a test, not as oneDNN does."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor

    def folded(self, x_scale: float, zero_point: int) -> torch.Tensor:
        """The bias that makes up for the zero point of the input."""
        sums = self.weight.flatten(1).sum(1, dtype=torch.int64)
        return (self.bias.double() - zero_point * sums * (self.scale.double() * x_scale)).float()


@dataclass(frozen=True)
class Case:
    """An image ``[batch, channels, height, width]`` and the layer that is computed on it."""

    image: tuple[int, int, int, int]
    shape: Shape
    result: Result
    adds: bool = False


def cases() -> Iterator[Case]:
    """A case for each kernel: with padding, with numbers of channels that do not fill a register, and with
    tiles that are not full.
    """
    point = Shape((72, 20, 1, 1))
    yield Case((1, 20, 5, 7), point, _FLOAT)
    yield Case((2, 20, 5, 7), point, _RELU, adds=True)
    yield Case((1, 20, 1, 1), Shape((40, 20, 1, 1)), _SWISH)
    yield Case((1, 3, 11, 12), Shape((24, 3, 3, 3), (2, 2), (1, 1)), _SIX)
    yield Case((1, 18, 6, 6), Shape((16, 18, 3, 3), (1, 1), (2, 2), (2, 2)), _FLOAT)
    yield Case((2, 3, 4, 9), Shape((8, 3, 1, 3)), _FLOAT)  # one row, read as one
    yield Case((2, 32, 6, 9), Shape((40, 32, 3, 3), (1, 1), (1, 1)), _RELU, adds=True)
    yield Case((1, 16, 9, 9), Shape((24, 16, 3, 3), (2, 2), (1, 1)), _FLOAT)
    for deep, groups in ((4, 5), (8, 5), (16, 2), (20, 2)):
        shape = Shape((deep * groups, deep, 3, 3), (deep // 16 + 1,) * 2, (1, 1), groups=groups)
        yield Case((2, deep * groups, 6, 9), shape, _RELU if deep > 4 else _FLOAT)
    for size, stride in ((3, 1), (3, 2), (5, 1), (5, 2), (7, 1), (7, 2)):
        shape = Shape((70, 1, size, size), (stride, stride), (size // 2, size // 2), groups=70)
        yield Case((1, 70, 9, 8), shape, _SWISH if size == 5 else _FLOAT)


def wrong(layout: Layout) -> str:
    """Which cases a library with weights of ``layout`` computes wrongly on this CPU; empty if none."""
    generator = torch.Generator().manual_seed(0)
    for case in cases():
        found, expected = computed(case, generator, layout)
        off = (found.double() - expected).abs().max()
        limit = 0.5 + _CLOSE if case.result.dtype == torch.uint8 else _CLOSE * expected.abs().max()
        if not off <= limit:
            return f"its {case.shape} for {case.image} is wrong on this CPU, by {float(off):.3g}"
    return _wrong_image(generator) or _wrong_attention(generator)


def _wrong_image(generator: torch.Generator) -> str:
    """Which kernel for images is wrong: on channels that fill a register and some that do not."""
    size = (2, 150, 5, 7)
    for name, found, expected in image_results(size, generator):
        off = (found.double() - expected.clamp(0, 255)).abs().max()
        if not off <= 0.5 + _CLOSE:
            return f"its {name} for {size} is wrong on this CPU, by {float(off):.3g}"
    return ""


def _wrong_attention(generator: torch.Generator) -> str:
    """Which attention is wrong: on sizes that fill registers and some that do not."""
    for terms in range(3):
        found, expected = attention_result((2, 3, 11, 37, 20, 19), terms, generator)
        off = (found.double() - expected).abs().max()
        if not off <= 0.5 + _CLOSE_ATTENTION:
            return f"its attention with {terms} terms is wrong on this CPU, by {float(off):.3g}"
    return ""


def attention_result(
    size: tuple[int, int, int, int, int, int],
    terms: int,
    generator: torch.Generator,
    run: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The library's result, and the exact one before it is rounded, of attention with so many terms added.

    ``size``: batch, heads, queries, keys, channels of both, of the values. ``run``: see ``image_results``.
    """
    run = run or torch.ops.backquant_kernels
    batch, heads, queries, keys, deep, wide = size
    rows = ((queries, deep), (keys, deep), (keys, wide))
    q, k, v = (  # a head's channels side by side in a row of all heads
        torch.randn(batch, count, heads, channels, generator=generator).transpose(1, 2)
        for count, channels in rows
    )
    added = [
        torch.randn(1, heads, queries, keys, generator=generator),
        torch.randn(batch, 1, 1, keys, generator=generator),
    ][:terms]
    operators = (run.attention, run.attention_biased, run.attention_biased_twice)
    found = operators[terms](q, k, v, *added, deep**-0.5, 0.02, 120)
    scores = q.double() @ k.double().transpose(2, 3) * deep**-0.5
    scores = sum(added, scores)
    value = torch.softmax(scores, -1) @ v.double()
    return found, (value / 0.02 + 120).clamp(0, 255)


def image_results(
    size: tuple[int, int, int, int], generator: torch.Generator, run: Any = None
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """The name, the library's result and the exact one before it is rounded, of each kernel for images.

    ``run``: the library's operators, by default those of this process.
    """
    run = run or torch.ops.backquant_kernels
    x, gate = _integers(size, generator), _integers((*size[:2], 1, 1), generator)
    yield "average", run.averaged(x), x.double().mean((2, 3), keepdim=True)
    tall, wide = size[2] > 2, size[3] > 1
    window = ((3 if tall else 1, 2 if wide else 1), (2, 1), (1 if tall else 0, 1 if wide else 0))
    found = run.maxima(x, *window[0], *window[1], *window[2], True)
    yield "maxima", found, F.max_pool2d(x.double(), *window, ceil_mode=True)
    value = (x.double() - 120) * (gate.double() - 30) * 0.00713 + 55
    yield "gate", run.gated(x, gate, 120.0, 30.0, 0.00713, 55.0, 3), value.clamp(min=3)
    numbers = torch.randn(2, size[1] + 16, generator=generator)
    numbers[1] = numbers[1] * 50 + 100
    scale, shift = (each[: size[1]].double().view(-1, 1, 1) for each in numbers)
    found = run.rescaled(x, numbers.flatten(), 7)
    yield "rescale", found, (x.double() * scale + shift).clamp(min=7)
    floats = torch.randn(size, generator=generator).contiguous(memory_format=torch.channels_last)
    yield "quantize", run.quantized(floats, 0.0173, 101), floats.double() / 0.0173 + 101
    times = torch.randn((*size[:2], 1, 1), generator=generator)
    product = floats.double() * times.double() / 0.0173 + 101
    yield "quantize a product", run.quantized_product(floats, times, 0.0173, 101), product
    for planes in (floats[:, :3].contiguous(), floats.contiguous()):
        found = run.quantized_planes(planes, 0.0173, 101)
        yield "quantize planes", found, planes.double() / 0.0173 + 101
    table = torch.randperm(256, generator=generator).to(torch.uint8)
    half = (size[1] + 1) // 2
    left, right = x[:, :half], x[:, size[1] - half :]
    turns = torch.stack([left, right], 2).flatten(1, 2)
    yield "shuffle", run.shuffled(left, right), turns.double()
    parts = [left, right, x]
    yield "join", run.joined(parts), torch.cat(parts, 1).double()
    both = [part for part in (right, left[:, : size[1] - half]) if part.shape[1]]
    expected = torch.cat(both, 1).double() * scale + shift
    yield "join and rescale", run.joined_rescaled(both, numbers.flatten(), 7), expected.clamp(min=7)
    for some in (x, x[:, half - 1 :]):
        yield "look up", run.looked_up(some, table), table.double()[some.long()]


def computed(
    case: Case, generator: torch.Generator, layout: Layout, run: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The library's result on random integers, and the exact one before it is rounded.

    ``run``: the library's operators, by default those of this process.
    """
    run = run or torch.ops.backquant_kernels
    channels = case.shape.weight[0]
    x = _integers(case.image, generator)
    weight = torch.randint(-127, 128, case.shape.weight, dtype=torch.int8, generator=generator)
    scale = torch.rand(channels, generator=generator) * 2e-3 + 1e-3
    weights = PlainWeights(weight, scale, torch.randn(channels, generator=generator))
    steps = (case.shape.stride, case.shape.padding, case.shape.dilation, case.shape.groups)
    sums = F.conv2d(x.double() - _X[1], weight.double(), None, *steps)
    value = sums * (scale.double() * _X[0]).view(-1, 1, 1) + weights.bias.double().view(-1, 1, 1)
    if case.adds:
        other = _integers(tuple(value.shape), generator)
        value = value + (other.double() - _OTHER[1]) * _OTHER[0]
        made = plan(case.shape, weights, _X, case.result, _OTHER, layout)
        return run.convolution_add(x, other, made), _finished(value, case.result)
    found = run.convolution(x, plan(case.shape, weights, _X, case.result, layout=layout))
    return found, _finished(value, case.result)


def _integers(size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    made = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    return made.contiguous(memory_format=torch.channels_last)


def _finished(value: torch.Tensor, result: Result) -> torch.Tensor:
    if result.post_op == "relu":
        value = value.relu()
    elif result.post_op == "hardtanh":
        value = value.clamp(*result.numbers)
    elif result.post_op == "swish":
        value = F.silu(value)
    elif result.post_op == "gelu":
        value = F.gelu(value, approximate=result.algorithm)
    if result.dtype == torch.float32:
        return value
    return (value / result.scale + result.zero_point).clamp(0, 255)
