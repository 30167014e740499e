"""Uses of an operator: its recorded example, and drawn ones with other sizes and parameters.

What is drawn need not be possible (a kernel larger than its image): who builds it asks the float operator.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from backquant.operators.example import INPUT, Sample, Weight
from backquant.operators.operator import Operator

_WIDTHS = (1, 2, 3, 5, 7, 8, 9, 16, 17, 33)
_BATCHES = (1, 2, 3)


def drawn_sample(operator: Operator, choice: random.Random) -> Sample:
    """Another use of ``operator``; operators without sizes to draw keep their example.

    >>> from backquant.operators import find
    >>> import torch
    >>> drawn_sample(find(torch.nn.Linear), random.Random(0)).shapes == find(torch.nn.Linear).sample.shapes
    False
    """
    draw = _DRAWN.get(operator.name) or _DRAWN.get(operator.family)
    if draw is None:
        return operator.sample
    return draw(operator.sample, choice)


def _axes(sample: Sample) -> int:
    return len(sample.shapes[0]) - 2


def _conv(sample: Sample, choice: random.Random) -> Sample:
    axes = _axes(sample)
    kind = choice.choice(("dense", "dense", "grouped", "depthwise", "point"))
    groups = choice.choice((2, 3)) if kind == "grouped" else 1
    read, made = choice.choice(_WIDTHS) * groups, choice.choice(_WIDTHS) * groups
    if kind == "depthwise":
        groups, made = read, read * choice.choice((1, 1, 2))
    kernel = tuple(1 if kind == "point" else choice.choice((1, 2, 3, 5)) for _ in range(axes))
    stride = tuple(choice.choice((1, 1, 2, 3)) for _ in range(axes))
    dilation = tuple(choice.choice((1, 1, 2)) for _ in range(axes))
    padding = tuple(choice.choice((0, 1, k // 2)) for k in kernel)
    least = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    shape = (choice.choice(_BATCHES), read, *(n + choice.randint(0, 6) for n in least))
    bias = choice.random() < 0.7
    return replace(
        sample,
        shapes=(shape,),
        module_args=(read, made, kernel, stride, padding, dilation, groups, bias),
        call=(
            INPUT,
            Weight((made, read // groups, *kernel)),
            Weight((made,)) if bias else None,
            stride,
            padding,
            dilation,
            groups,
        ),
        aten=None,
    )


def _conv_transpose(sample: Sample, choice: random.Random) -> Sample:
    axes = _axes(sample)
    groups = choice.choice((1, 1, 2))
    read, made = choice.choice(_WIDTHS) * groups, choice.choice(_WIDTHS) * groups
    kernel = tuple(choice.choice((1, 2, 3)) for _ in range(axes))
    stride = tuple(choice.choice((1, 2)) for _ in range(axes))
    padding = tuple(choice.choice((0, k // 2)) for k in kernel)
    extra = tuple(choice.choice((0, s - 1)) for s in stride)
    shape = (choice.choice(_BATCHES), read, *(choice.randint(3, 7) for _ in range(axes)))
    bias = choice.random() < 0.7
    return replace(
        sample,
        shapes=(shape,),
        module_args=(read, made, kernel, stride, padding, extra, groups, bias),
        call=(
            INPUT,
            Weight((read, made // groups, *kernel)),
            Weight((made,)) if bias else None,
            stride,
            padding,
            extra,
            groups,
        ),
        aten=None,
    )


def _linear(sample: Sample, choice: random.Random) -> Sample:
    read, made = choice.choice(_WIDTHS), choice.choice(_WIDTHS)
    shape = (*(choice.choice(_BATCHES) for _ in range(choice.choice((1, 1, 2, 3)))), read)
    bias = choice.random() < 0.7
    call = (INPUT, Weight((made, read)), Weight((made,)) if bias else None)
    return replace(sample, shapes=(shape,), module_args=(read, made, bias), call=call, aten=None)


def _grouped_linear(sample: Sample, choice: random.Random) -> Sample:
    """Rows in groups, some of them empty, each with a weight of its own."""
    ends = sorted(choice.randint(0, 9) for _ in range(choice.choice((1, 2, 3))))
    read, made = choice.choice(_WIDTHS), len(ends) * choice.choice(_WIDTHS)
    call = (INPUT, Weight((made, read)), torch.tensor(ends))
    return replace(sample, shapes=((max(1, ends[-1]), read),), call=call, aten=None)


def _window(sample: Sample, choice: random.Random) -> Sample:
    axes = _axes(sample)
    kernel = tuple(choice.choice((1, 2, 3)) for _ in range(axes))
    stride = tuple(choice.choice((1, 2, 3)) for _ in range(axes))
    padding = tuple(choice.choice((0, k // 2)) for k in kernel)
    shape = _image(axes, choice)
    given = (kernel, stride, padding)
    return replace(sample, shapes=(shape,), module_args=given, call=(INPUT, *given), aten=None)


def _adaptive(sample: Sample, choice: random.Random) -> Sample:
    axes = _axes(sample)
    size = tuple(choice.choice((1, 1, 2, 3, 5)) for _ in range(axes))
    shape = _image(axes, choice)
    return replace(sample, shapes=(shape,), module_args=(size,), call=(INPUT, size), aten=None)


def _image(axes: int, choice: random.Random, channels: int | None = None) -> tuple[int, ...]:
    count = choice.choice(_WIDTHS) if channels is None else channels
    return (choice.choice(_BATCHES), count, *(choice.randint(4, 9) for _ in range(axes)))


def _values(sample: Sample, choice: random.Random) -> Sample:
    """Functions of one value: any rank. Those with a parameter for each channel keep their shape."""
    if sample.module_args or any(isinstance(item, Weight) for item in sample.call):
        return sample
    shape = tuple(choice.choice(_WIDTHS) for _ in range(choice.randint(1, 4)))
    return replace(sample, shapes=(shape,) * len(sample.shapes))


def _pairs(sample: Sample, choice: random.Random) -> Sample:
    """Two tensors of one shape, or two that broadcast."""
    shape = [choice.choice((1, 2, 3, 8, 17)) for _ in range(choice.randint(1, 4))]
    other = list(shape)
    kind = choice.choice(("same", "same", "channel", "shorter", "outer"))
    if kind == "channel":
        other[-1] = 1
    if kind == "shorter" and len(other) > 1:
        other = other[1:]
    if kind == "outer":
        other[0] = 1
    return replace(sample, shapes=(tuple(shape), tuple(other)))


def _matrices(sample: Sample, choice: random.Random) -> Sample:
    batch = [choice.choice((1, 2, 3)) for _ in range(choice.randint(0, 2))]
    rows, inner, columns = (choice.choice(_WIDTHS) for _ in range(3))
    return replace(sample, shapes=((*batch, rows, inner), (*batch, inner, columns)))


def _softmax(sample: Sample, choice: random.Random) -> Sample:
    shape = tuple(choice.choice((1, 2, 3, 8, 17)) for _ in range(choice.randint(2, 4)))
    dim = choice.randrange(-len(shape), len(shape))
    return replace(sample, shapes=(shape,), module_args=(dim,), call=(INPUT, dim))


def _cat(sample: Sample, choice: random.Random) -> Sample:
    rank = choice.randint(1, 4)
    dim = choice.randrange(-rank, rank)
    shape = [choice.choice((1, 2, 3, 8)) for _ in range(rank)]
    parts = []
    for _ in range(choice.choice((1, 2, 3))):
        part = list(shape)
        part[dim] = choice.choice((1, 2, 5))
        parts.append(tuple(part))
    return replace(sample, shapes=tuple(parts), call=([INPUT] * len(parts), dim))


def _stack(sample: Sample, choice: random.Random) -> Sample:
    shape = tuple(choice.choice((1, 2, 3, 8)) for _ in range(choice.randint(1, 3)))
    dim = choice.randrange(-len(shape) - 1, len(shape) + 1)
    return replace(sample, shapes=(shape, shape), call=([INPUT, INPUT], dim))


def _mean(sample: Sample, choice: random.Random) -> Sample:
    shape = _image(2, choice)
    dim = choice.choice(((2, 3), (-2, -1), (-1,), (1,)))
    return replace(sample, shapes=(shape,), call=(INPUT, dim, choice.random() < 0.5))


def _norm(sample: Sample, choice: random.Random) -> Sample:
    """Batch and instance norms: other channels."""
    if not sample.module_args or not isinstance(sample.module_args[0], int):
        return sample
    if len(sample.module_args) > 1:  # group norm
        groups = choice.choice((1, 2, 3))
        channels = groups * choice.choice((1, 2, 5))
        return replace(
            sample,
            shapes=(_image(2, choice, channels),),
            module_args=(groups, channels),
            call=(INPUT, groups, Weight((channels,)), Weight((channels,))),
            aten=None,
        )
    channels = choice.choice(_WIDTHS)
    axes = _axes(sample)
    return replace(sample, shapes=(_image(axes, choice, channels),), module_args=(channels,))


def _layer_norm(sample: Sample, choice: random.Random) -> Sample:
    size = choice.choice((2, 5, 8, 17, 33))
    shape = (*(choice.choice(_BATCHES) for _ in range(choice.choice((1, 2)))), size)
    weights = (Weight((size,)), Weight((size,)))
    return replace(
        sample, shapes=(shape,), module_args=((size,),), call=(INPUT, (size,), *weights), aten=None
    )


def _embedding(sample: Sample, choice: random.Random) -> Sample:
    rows, width = choice.choice((3, 10, 33)), choice.choice((2, 4, 16, 34))
    shape = (choice.choice(_BATCHES), choice.choice((1, 5)))
    return replace(
        sample,
        shapes=(shape,),
        module_args=(rows, width),
        call=(INPUT, Weight((rows, width))),
        aten=None,
        integers=rows,
    )


def _recurrent(sample: Sample, choice: random.Random) -> Sample:
    read, made = choice.choice((1, 3, 8, 17)), choice.choice((1, 4, 9))
    shape = (*sample.shapes[0][:-2], choice.choice(_BATCHES), read)
    return replace(sample, shapes=(shape,), module_args=(read, made))


_DRAWN: dict[str, Callable[[Sample, random.Random], Sample]] = {
    **{f"conv{n}d": _conv for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _conv_transpose for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d": _window for n in (1, 2, 3) for kind in ("max", "avg")},
    **{f"adaptive_avg_pool{n}d": _adaptive for n in (1, 2, 3)},
    **dict.fromkeys(("add", "sub", "mul"), _pairs),
    **dict.fromkeys(("identity", "contiguous", "detach"), _values),
    "linear": _linear,
    "grouped_linear": _grouped_linear,
    "matmul": _matrices,
    "softmax": _softmax,
    "cat": _cat,
    "stack": _stack,
    "mean": _mean,
    "layer_norm": _layer_norm,
    "activation": _values,
    "fixed_qparams": _values,
    "norm": _norm,
    "embedding": _embedding,
    "recurrent": _recurrent,
}


def with_features(sample: Sample, features: int) -> Sample:
    """A linear layer or a table of embeddings with so many features, for weights in groups of them.

    >>> from backquant.operators import find
    >>> import torch
    >>> with_features(find(torch.nn.Linear).sample, 256).shapes
    ((3, 256),)
    """
    reads = sample.integers is None  # a table gives them
    shapes = tuple((*shape[:-1], features) for shape in sample.shapes) if reads else sample.shapes
    given, named = list(sample.module_args), dict(sample.module_kwargs)
    if given:
        given[0 if reads else 1] = features
    elif named:
        named["in_features" if reads else "embedding_dim"] = features
    call = tuple(
        Weight((item.shape[0], features))
        if isinstance(item, Weight) and len(item.shape) == 2
        else item
        for item in sample.call
    )
    return replace(
        sample, shapes=shapes, module_args=tuple(given), module_kwargs=named, call=call, aten=None
    )


def sample_text(sample: Sample) -> str:
    """The sizes of a sample in one line, for reports.

    >>> sample_text(Sample(((1, 3, 8, 8),), module_args=(3, 4, 3)))
    '[1, 3, 8, 8] (3, 4, 3)'
    """
    shapes = " ".join(str(list(shape)) for shape in sample.shapes)
    args: Any = sample.module_args or tuple(
        item for item in sample.call if item is not INPUT and not isinstance(item, (Weight, list))
    )
    return f"{shapes} {args}" if args else shapes
