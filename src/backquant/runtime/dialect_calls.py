"""Which function of ``torch.ops.quantized`` stands for a function between quantized tensors, with its bits.

Invariants

1. A function of one value is tried on each integer that it can get, in rows as long as vectors and shorter:
   operators compute the ends of a row otherwise.
2. A number is a quantized tensor without dimensions that stands for it exactly.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

RANGES = {torch.quint8: (0, 255), torch.qint8: (-128, 127), torch.qint32: (-(2**31), 2**31 - 1)}
_STORAGE = {torch.quint8: torch.uint8, torch.qint8: torch.int8}
BINARY = {operator.add: "add", torch.add: "add", operator.mul: "mul", torch.mul: "mul"}


class Numbers(NamedTuple):
    """What the integers of a quantized tensor stand for. ``limits``: where narrower than the dtype."""

    scale: float
    zero_point: int
    dtype: torch.dtype
    limits: tuple[int, int] | None


class Form(NamedTuple):
    """``name`` of ``torch.ops.quantized``, which takes its input, then the arguments ``before``, then scale
    and zero point, then those ``after``. ``arguments``: of the float function, with their defaults."""

    name: str
    arguments: dict[str, Any]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    of_one_value: bool = True


_AFFINE = {"weight": None, "bias": None, "eps": 1e-5}
_STATISTICS = {"running_mean": None, "running_var": None, "weight": None, "bias": None}
FORMS: dict[Any, Form] = {
    F.hardswish: Form("hardswish", {"inplace": False}),
    F.elu: Form("elu", {"alpha": 1.0, "inplace": False}, (), ("alpha",)),
    F.celu: Form("celu", {"alpha": 1.0, "inplace": False}, (), ("alpha",)),
    F.leaky_relu: Form(
        "leaky_relu", {"negative_slope": 0.01, "inplace": False}, ("negative_slope", "inplace")
    ),
    F.layer_norm: Form(
        "layer_norm",
        {"normalized_shape": None, **_AFFINE},
        ("normalized_shape", "weight", "bias", "eps"),
        of_one_value=False,
    ),
    F.group_norm: Form(
        "group_norm",
        {"num_groups": None, **_AFFINE},
        ("num_groups", "weight", "bias", "eps"),
        of_one_value=False,
    ),
    F.instance_norm: Form(
        "instance_norm",
        {**_STATISTICS, "use_input_stats": True, "momentum": 0.1, "eps": 1e-5},
        ("weight", "bias", "eps"),
        of_one_value=False,
    ),
}


class Call(NamedTuple):
    """``torch.ops.quantized.<name>`` of an input, ``before``, scale and zero point, ``after``."""

    name: str
    before: tuple[Any, ...]
    after: tuple[Any, ...] = ()

    def __call__(self, x: torch.Tensor, out: Numbers) -> torch.Tensor:
        """On data."""
        function = getattr(torch.ops.quantized, self.name)
        result: torch.Tensor = function(x, *self.before, out.scale, out.zero_point, *self.after)
        return result


def function_call(node: fx.Node, source: Numbers, out: Numbers) -> Call | None:
    """The call for a function of ``FORMS``; ``None`` where it would give other bits."""
    form = FORMS.get(node.target)
    if form is None or len(node.args) > 1 + len(form.arguments):
        return None
    values = {**form.arguments, **dict(zip(form.arguments, node.args[1:], strict=False))}
    values.update({name: value for name, value in node.kwargs.items() if name != "input"})
    values["inplace"] = False
    call = Call(
        form.name,
        tuple(values[name] for name in form.before),
        tuple(values[name] for name in form.after),
    )
    if not form.of_one_value:
        is_measured = values.get("use_input_stats", True) and values.get("running_mean") is None
        return call if is_measured and measures_as_kernels(source) else None
    rest, kwargs = node.args[1:], {**node.kwargs}
    kwargs.pop("input", None)
    if "inplace" in kwargs:
        kwargs["inplace"] = False
    if any(isinstance(value, fx.Node) for value in (*rest, *kwargs.values())):
        return None
    function: Any = node.target
    return call if _agree(call, lambda x: function(x, *rest, **kwargs), source, out) else None


def number_call(node: fx.Node, relu: bool, source: Numbers, out: Numbers) -> Call | None:
    """The call for a sum or product with a number; ``None`` where it would give other bits."""
    name = BINARY.get(node.target)  # type: ignore[arg-type]
    numbers = [value for value in node.args if isinstance(value, (int, float))]
    if name is None or node.kwargs or len(node.args) != 2 or len(numbers) != 1:
        return None
    number = float(numbers[0])
    if not math.isfinite(number) or isinstance(numbers[0], bool):
        return None
    call = Call(f"{name}_relu" if relu else name, (_constant(number, source.dtype),))
    target: Any = node.target

    def real(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = target(x, numbers[0])
        return y.relu() if relu else y

    return call if _agree(call, real, source, out) else None


def _constant(number: float, dtype: torch.dtype) -> torch.Tensor:
    """Invariant 2: 1 - 0, or 0 - 1, times the scale."""
    integer, zero_point = (0, 1) if number < 0 else (1 if number else 0, 0)
    tensor = torch.tensor(integer, dtype=_STORAGE[dtype])
    return torch._make_per_tensor_quantized_tensor(tensor, abs(number) or 1.0, zero_point)


def measures_as_kernels(source: Numbers) -> bool:
    """Whether norms that measure do so on the values: of scales above 1 kernels take the integers."""
    return source.scale <= 1


def _agree(
    call: Call, real: Callable[[torch.Tensor], torch.Tensor], source: Numbers, out: Numbers
) -> bool:
    """Invariant 1."""
    if source.dtype not in _STORAGE or out.dtype != source.dtype:
        return False
    low, high = source.limits or RANGES[source.dtype]
    integers = torch.arange(low, high + 1, dtype=torch.int32).to(_STORAGE[source.dtype])
    least, most = out.limits or RANGES[out.dtype]
    for length in (len(integers), 31):
        for row in integers.split(length):
            x = torch._make_per_tensor_quantized_tensor(row, source.scale, source.zero_point)
            expected = torch.quantize_per_tensor(
                real(x.dequantize()), out.scale, out.zero_point, out.dtype
            )
            both = (y.int_repr().clamp(least, most) for y in (expected, call(x, out)))
            if not torch.equal(*both):
                return False
    return True
