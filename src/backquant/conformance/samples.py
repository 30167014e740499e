"""Uses of an operator: its recorded example, and drawn ones with other sizes and parameters.

What is drawn need not be possible (a kernel larger than its image): who builds it asks the float operator.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from backquant.backend_config import DTypeConfig
from backquant.dtypes import is_quantized
from backquant.match.fixes import ObserverFix, QConfigFix, qconfig_fix, unconditional
from backquant.match.verdict import QConfigRequest, Roles
from backquant.operators.operator import INPUT, Operator, Sample, Weight

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


def _convolved(
    sample: Sample, image: tuple[int, ...], made: int, kernel: tuple[int, ...], groups: int,
    *settings: tuple[int, ...], bias: bool = True,
) -> Sample:  # fmt: skip
    """A convolution of ``image``; ``settings``: stride, padding, dilation, and of a transposed one also the
    padding of the output."""
    read, (stride, padding, dilation, *more) = image[1], settings
    by_group = (read, made // groups) if more else (made, read // groups)
    weights = (Weight((*by_group, *kernel)), Weight((made,)) if bias else None)
    order = (*more, groups, dilation) if more else (dilation, groups)
    ends = (*more, groups, bias, dilation) if more else (dilation, groups, bias)
    return replace(
        sample,
        shapes=(image,),
        module_args=(read, made, kernel, stride, padding, *ends),
        call=(INPUT, *weights, stride, padding, *order),
        aten=None,
    )


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
    image = (choice.choice(_BATCHES), read, *(n + choice.randint(0, 6) for n in least))
    bias = choice.random() < 0.7
    return _convolved(sample, image, made, kernel, groups, stride, padding, dilation, bias=bias)


def _conv_transpose(sample: Sample, choice: random.Random) -> Sample:
    axes = _axes(sample)
    groups = choice.choice((1, 1, 2))
    read, made = choice.choice(_WIDTHS) * groups, choice.choice(_WIDTHS) * groups
    kernel = tuple(choice.choice((1, 2, 3)) for _ in range(axes))
    stride = tuple(choice.choice((1, 2)) for _ in range(axes))
    padding = tuple(choice.choice((0, k // 2)) for k in kernel)
    extra = tuple(choice.choice((0, s - 1)) for s in stride)
    image = (choice.choice(_BATCHES), read, *(choice.randint(3, 7) for _ in range(axes)))
    settings, bias = (stride, padding, (1,) * axes, extra), choice.random() < 0.7
    return _convolved(sample, image, made, kernel, groups, *settings, bias=bias)


def _linear(sample: Sample, choice: random.Random) -> Sample:
    read, made = choice.choice(_WIDTHS), choice.choice(_WIDTHS)
    rows = tuple(choice.choice(_BATCHES) for _ in range(choice.choice((1, 1, 2, 3))))
    return _layer(sample, rows, read, made, bias=choice.random() < 0.7)


def _layer(sample: Sample, rows: tuple[int, ...], read: int, made: int, *, bias: bool) -> Sample:
    call = (INPUT, Weight((made, read)), Weight((made,)) if bias else None)
    shapes, given = ((*rows, read),), (read, made, bias)
    return replace(sample, shapes=shapes, module_args=given, module_kwargs={}, call=call, aten=None)


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


# Uses of an operator near a recorded one: one size or parameter differs, with those that depend on it.

_DRAWN_VARIANTS = 8
_MOST = 1 << 20  # elements of an input, the weights, a result
_SMALL = (1, 2)
_WORDS = {
    "padding_mode": ("zeros", "reflect", "replicate", "circular"),
    "mode": ("nearest", "bilinear", "constant", "reflect", "circular", "sum", "mean", "max"),
    "approximate": ("none", "tanh"),
}
_AXES = ("kernel_size", "stride", "padding", "dilation", "output_padding")


def variants(operator: Operator, values: Iterable[Any]) -> Iterator[Sample]:
    """The recorded sample, drawn ones, and those with one of ``values`` in one place of them.

    >>> from backquant.operators import find
    >>> (8, 8) in {use.module_args[2] for use in variants(find(nn.Conv2d), [8]) if use.module_args}
    True
    """
    wanted = [*dict.fromkeys([*_SMALL, *values])]
    drawn = [drawn_sample(operator, random.Random(seed)) for seed in range(_DRAWN_VARIANTS)]
    for sample in (operator.sample, *drawn):
        if _fits(operator, sample):
            yield sample
    for sample in _changed(operator, wanted):
        if _fits(operator, sample):
            yield sample


def _fits(operator: Operator, sample: Sample) -> bool:
    return all(size <= _MOST for size in _sizes(operator, sample))


def _sizes(operator: Operator, sample: Sample) -> Iterator[int]:
    """Elements of what a use reads and, as far as they are known without memory, of weights and results."""
    yield from (math.prod(shape) for shape in sample.shapes)
    yield from (math.prod(item.shape) for item in sample.call if isinstance(item, Weight))
    try:  # whoever builds it asks the float operator
        with torch.device("meta"):
            module = operator.modules[0](*sample.module_args, **sample.module_kwargs)
    except Exception:
        return
    yield sum(weight.numel() for weight in module.parameters())
    if (
        operator.family == "recurrent"
    ):  # a row for each row that is read; PyTorch's takes long without memory
        return
    dtype = torch.float if sample.integers is None else torch.long
    results: Any = ()
    with suppress(Exception), torch.device("meta"):
        results = module(*(torch.empty(shape, dtype=dtype) for shape in sample.shapes))
    yield from (each.numel() for each in tree_leaves(results) if isinstance(each, torch.Tensor))


def _changed(operator: Operator, wanted: Sequence[Any]) -> Iterator[Sample]:
    numbers = [v for v in wanted if type(v) is int and v >= 0]
    if operator.family == "conv":
        yield from _convolutions(operator, numbers)
    if operator.name == "linear":
        yield from _linears(operator.sample, [number for number in numbers if number])
    yield from _parameters(operator, wanted)
    yield from _shapes(operator.sample, [number for number in numbers if number])


def _shapes(sample: Sample, numbers: Sequence[int]) -> Iterator[Sample]:
    """All inputs with another size along one axis, or of another rank."""
    for number in numbers:
        for axis in range(len(sample.shapes[0])):
            changed = [
                (*shape[:axis], number, *shape[axis + 1 :]) if axis < len(shape) else shape
                for shape in sample.shapes
            ]
            yield replace(sample, shapes=tuple(changed))
        yield replace(sample, shapes=tuple((number,) for _ in sample.shapes))
        if 1 <= number <= 8:
            yield replace(sample, shapes=tuple((2,) * number for _ in sample.shapes))


def _parameters(operator: Operator, wanted: Sequence[Any]) -> Iterator[Sample]:
    """Each parameter of the module with each value that is of its kind."""
    if not operator.modules:
        return
    sample = operator.sample
    given = _named(operator.modules[0], sample)
    for name, default in given.items():
        for value in (*wanted, *_WORDS.get(name, ()), True, False):
            if type(value) is not type(default) and not (name in _AXES and type(value) is int):
                continue
            if value == 0 and type(value) is int and "padding" not in name:
                continue
            made = {**given, name: value}
            yield replace(sample, module_args=(), module_kwargs=made)


def _named(module: type[nn.Module], sample: Sample) -> dict[str, Any]:
    """The arguments of a module by name, defaults among them."""
    bound = inspect.signature(module).bind(*sample.module_args, **sample.module_kwargs)
    bound.apply_defaults()
    return {k: v for k, v in bound.arguments.items() if k not in ("device", "dtype", "args")}


def _linears(sample: Sample, numbers: Sequence[int]) -> Iterator[Sample]:
    """Linear layers with so many features, read or made."""
    for number in numbers:
        for read, made in ((number, 16), (16, number), (number, number)):
            yield _layer(sample, sample.shapes[0][:-1], read, made, bias=True)


def _convolutions(operator: Operator, numbers: Sequence[int]) -> Iterator[Sample]:
    axes = len(operator.sample.shapes[0]) - 2
    usual: dict[str, Any] = {
        "read": 4, "made": 4, "kernel": 3, "stride": 1, "padding": 1, "dilation": 1, "groups": 1,
    }  # fmt: skip
    for number in numbers:
        for name in usual:
            if (number > 2) if name == "padding" else (number == 0):
                continue
            changed = {**usual, name: number}
            if name == "groups":
                changed.update(read=2 * number, made=2 * number)
                depthwise = {**changed, "read": number, "made": number}
                yield _convolution(operator, axes, depthwise, None)
            yield _convolution(operator, axes, changed, None)
            if name in ("kernel", "stride", "dilation"):
                for axis in range(axes):
                    yield _convolution(operator, axes, changed, axis)


def _convolution(operator: Operator, axes: int, given: dict[str, Any], axis: int | None) -> Sample:
    """``axis``: the one that the changed parameters are for; the others have usual ones."""

    def spread(name: str, usual: int) -> tuple[int, ...]:
        return tuple(given[name] if axis in (None, at) else usual for at in range(axes))

    kernel, dilation = spread("kernel", 3), spread("dilation", 1)
    least = (d * (k - 1) + 2 for d, k in zip(dilation, kernel, strict=True))
    image = (2, given["read"], *(max(6, n) for n in least))
    extra = ((0,) * axes,) if "transpose" in operator.name else ()
    settings = (spread("stride", 1), (given["padding"],) * axes, dilation, *extra)
    return _convolved(operator.sample, image, given["made"], kernel, given["groups"], *settings)


# The QConfig that a dtype config asks for: what a user would write to get it.
_MEASURING = ("MinMaxObserver", "PerChannelMinMaxObserver")


def asked_for(
    config: DTypeConfig,
    operator: Operator | None,
    choice: random.Random | None,
    *,
    trained: bool = False,
) -> QConfigFix:
    """The request for ``config``; weights per channel where ``choice`` says so and nothing speaks against it.

    >>> config = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
    >>> asked_for(config, None, None).activation.name
    'MinMaxObserver'
    """
    weighted = config.weight_dtype is not None
    axis = None if operator is None else operator.weight_channel_axis
    roles = Roles(activation=True, weight=weighted, bias=weighted, sums_axis=axis)
    made = qconfig_fix(unconditional(config), QConfigRequest(None, None), roles)
    if choice is not None and choice.random() < 0.5:
        made = _per_channel(made, config, operator)
    return _fake(made) if trained else made


def _per_channel(made: QConfigFix, config: DTypeConfig, operator: Operator | None) -> QConfigFix:
    demand = config.weight_dtype_with_constraints
    plain = made.weight.name == "MinMaxObserver" and demand.granularity is None
    if not plain or operator is None or operator.weight_channel_axis is None:
        return made
    if operator.family not in ("conv", "linear") or not operator.modules:
        return made
    if operator.weight_channel_axis != 0 or not is_quantized(demand.dtype):
        return made  # a scale for each channel of the input, which no engine has
    values = {**(made.weight.values or {}), "qscheme": torch.per_channel_symmetric}
    return replace_weight(made, ObserverFix("PerChannelMinMaxObserver", values))


def replace_weight(made: QConfigFix, weight: ObserverFix) -> QConfigFix:
    """``made`` with another observer of weights."""
    return made._replace(weight=weight)


def _fake(made: QConfigFix) -> QConfigFix:
    """The same as fake quantize modules, for training."""
    output = None if made.output is None else _fake_observer(made.output)
    return QConfigFix(_fake_observer(made.activation), _fake_observer(made.weight), output)


def _fake_observer(fix: ObserverFix) -> ObserverFix:
    if fix.name == "FixedQParamsObserver":
        return ObserverFix("FixedQParamsFakeQuantize", {"observer": fix})
    if fix.name not in _MEASURING:
        return fix
    return ObserverFix(
        "FakeQuantize", {"observer": replace(fix, values=None), **(fix.values or {})}
    )
