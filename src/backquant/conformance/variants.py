"""Uses of an operator near a recorded one: one size or parameter differs, with those that depend on it."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from backquant.backend_config import DTypeConfig
from backquant.conformance.samples import drawn_sample
from backquant.dtypes import is_quantized
from backquant.match.fixes import ObserverFix, QConfigFix, qconfig_fix, unconditional
from backquant.match.verdict import QConfigRequest, Roles
from backquant.operators.example import INPUT, Sample, Weight
from backquant.operators.operator import Operator

_DRAWN = 8
_MOST = 1 << 20  # elements of an input
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
    drawn = [drawn_sample(operator, random.Random(seed)) for seed in range(_DRAWN)]
    for sample in (operator.sample, *drawn):
        if _fits(sample):
            yield sample
    for sample in _changed(operator, wanted):
        if _fits(sample):
            yield sample


def _fits(sample: Sample) -> bool:
    return all(math.prod(shape) * _grown(sample, shape) <= _MOST for shape in sample.shapes)


def _grown(sample: Sample, shape: Sequence[int]) -> float:
    """How many times as large as its input of this shape the result of a module that enlarges it is."""
    axes = max(len(shape) - 2, 1)
    sizes = {**dict.fromkeys(("scale_factor", "size")), **sample.module_kwargs}
    factor, size = sizes["scale_factor"], sizes["size"]
    grown = 1.0 if factor is None else math.prod(_numbers(factor, axes))
    return max(1.0, grown if size is None else math.prod(_numbers(size, axes)))


def _numbers(value: Any, axes: int) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * axes


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
            call = (INPUT, Weight((made, read)), Weight((made,)))
            shape = (*sample.shapes[0][:-1], read)
            yield replace(
                sample,
                shapes=(shape,),
                module_args=(read, made),
                module_kwargs={},
                call=call,
                aten=None,
            )


def _convolutions(operator: Operator, numbers: Sequence[int]) -> Iterator[Sample]:
    axes = len(operator.sample.shapes[0]) - 2
    usual: dict[str, Any] = {
        "read": 4, "made": 4, "kernel": 3, "stride": 1, "padding": 1, "dilation": 1, "groups": 1,
    }  # fmt: skip
    for number in numbers:
        for name in ("read", "made", "kernel", "stride", "padding", "dilation", "groups"):
            if name == "padding" and number > 2:
                continue
            if number == 0 and name != "padding":
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

    def spread(value: int, usual: int) -> tuple[int, ...]:
        return tuple(value if axis in (None, at) else usual for at in range(axes))

    kernel, stride = spread(given["kernel"], 3), spread(given["stride"], 1)
    dilation = spread(given["dilation"], 1)
    padding, groups = (given["padding"],) * axes, given["groups"]
    least = (d * (k - 1) + 2 for d, k in zip(dilation, kernel, strict=True))
    shape = (2, given["read"], *(max(6, n) for n in least))
    transposed = "transpose" in operator.name
    first, second = (given["read"], given["made"]) if transposed else (given["made"], given["read"])
    rest = (
        stride,
        padding,
        *(((0,) * axes, groups, dilation) if transposed else (dilation, groups)),
    )
    module = (
        (given["read"], given["made"], kernel, stride, padding, (0,) * axes, groups, True, dilation)
        if transposed
        else (given["read"], given["made"], kernel, stride, padding, dilation, groups)
    )
    weights = (Weight((first, second // groups, *kernel)), Weight((given["made"],)))
    return replace(
        operator.sample,
        shapes=(shape,),
        module_args=module,
        call=(INPUT, *weights, *rest),
        aten=None,
    )


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
