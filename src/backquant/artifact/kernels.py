"""What a file may say to our kernels: their functions' arguments, and their modules' numbers.

Kernels get memory and numbers that lowering chose, and engines below them check little of it. So
everything that comes from a file is checked before a kernel is built or a graph that calls one:

1. Functions: those of ``FUNCTIONS``, and every argument that is no tensor is a literal.
2. Numbers, of functions and of modules alike, by their names: scales are finite and above 0, zero points
   fit their integers, windows and strides are positive and small, dtypes and names are known ones.
3. Tensors of modules: ``kernel_tensors``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from backquant.artifact import integer_checks
from backquant.dtypes import Requantization, Rounding
from backquant.errors import ArtifactError
from backquant.lower.kernels import attention

PACKAGE = "backquant.lower.kernels"
_POOLING = [f"{kind}_pool{n}d" for kind in ("adaptive_avg", "avg", "max") for n in (1, 2, 3)]
FUNCTIONS = frozenset(
    f"{PACKAGE}.{path}"
    for path in [
        "activation.clamp",
        "attention.attended",
        "attention.attended_whole",
        *(
            f"boundary.{name}"
            for name in ("dequantize", "multiply", "quantize", "requantize", "saturate")
        ),
        *(f"elementwise.{name}" for name in ("add", "add_relu", "mul", "mul_relu")),
        "integer.resize.nearest",
        "integer.resize.padded",
        "integer.values.rescale",
        "join.cat",
        "matrix.matmul",
        "matrix.softmax",
        *(f"pooling.{name}" for name in (*_POOLING, "mean")),
        "resize.resize_bilinear",
        "shuffle.shuffle",
    ]
)
_LARGEST_WINDOW = 1 << 16
_LARGEST_SIZE = 1 << 31
_INTEGERS = (torch.uint8, torch.int8, torch.int32)
_DTYPES = (*_INTEGERS, torch.float32, torch.float16, torch.bfloat16)
_WORDS = {
    "post_op": frozenset(
        [
            "none",
            "relu",
            "hardtanh",
            "hardswish",
            "swish",
            "gelu",
            "leaky_relu",
            "tanh",
            "sum",
            "sigmoid",
        ]
    ),
    "post_algorithm": frozenset(("", "none", "tanh")),
    "engine": frozenset(("fbgemm", "x86", "qnnpack", "onednn")),
    "kind": frozenset(("layer", "group", "instance", "lstm", "gru", "rnn_tanh", "rnn_relu")),
    "mode": frozenset(("sum", "mean")),
    "requantization": frozenset(each.value for each in Requantization),
    "rounding": frozenset(each.value for each in Rounding),
    "pad_mode": frozenset(("constant", "reflect", "replicate", "circular")),
    "resize_mode": frozenset(("nearest", "nearest-exact")),
}
#: Of kernels of the integer reference: whole numbers, with the least and the largest.
_BETWEEN = {
    "accumulator_bits": (32, 40),
    "headroom": (0, 20),
    "root_bits": (0, 8),
    "channels": (1, 1 << 24),
    "pad": (-_LARGEST_WINDOW, _LARGEST_WINDOW),
    "fill": (-_LARGEST_WINDOW, _LARGEST_WINDOW),
}
_OPERATORS = frozenset(
    f"{name}{relu}"
    for name in (
        "linear",
        *(f"conv{n}d" for n in (1, 2, 3)),
        *(f"conv_transpose{n}d" for n in (1, 2, 3)),
    )
    for relu in ("", "_relu")
)
_POST_NUMBERS = {"hardtanh": 2, "leaky_relu": 1}


def check_arguments(function: Callable[..., Any], args: Any, kwargs: Any, where: str) -> None:
    """Arguments of a call in a graph of one of ``FUNCTIONS``. Raises ``ArtifactError``."""
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise ArtifactError(f"{function.__name__}: {error}", where=where) from None
    for name, value in bound.arguments.items():
        if name in ("x", "y", "keys", "values", "parts"):
            nodes = value if isinstance(value, (list, tuple)) else [value]
            good = bool(nodes) and all(isinstance(node, Node) for node in nodes)
        else:
            good = _is_good(name, value)
        if not good:
            raise _bad(f"{name}={value!r}", function.__name__, where)


def check_config(cls: type, config: Any, where: str) -> None:
    """The decoded configuration of a kernel module. Raises ``ArtifactError``.

    >>> from backquant.lower.kernels.norm import Norm, NormConfig
    >>> check_config(Norm, NormConfig("group", (0,), 1e-5, 1.0, 0, 1.0, 0), "norm")
    Traceback (most recent call last):
    backquant.errors.ArtifactError: Norm cannot be built with size=(0,)
      where  norm
    """
    for name, value in vars(config).items():
        good = value in _OPERATORS if _is_operator(config, name) else _is_good(name, value)
        if not good:
            raise _bad(f"{name}={value!r}", cls.__name__, where)
    post_op = getattr(config, "post_op", "none")
    numbers = getattr(config, "post_numbers", ())
    if len(numbers) != _POST_NUMBERS.get(post_op, 0) and not (post_op == "relu" and not numbers):
        raise _bad(f"post_numbers={numbers!r}", cls.__name__, where)


def _is_operator(config: Any, name: str) -> bool:
    return name == "operator" and hasattr(config, "engine")


def _bad(what: str, name: str, where: str) -> ArtifactError:
    return ArtifactError(f"{name} cannot be built with {what[:120]}", where=where)


def _is_good(name: str, value: Any) -> bool:
    """Whether ``value`` can be the number or word called ``name``."""
    if isinstance(value, (list, tuple)) and name in ("scales", "zero_points", "fits"):
        return all(_is_good(name[:-1], item) for item in value)
    if name in _WORDS:
        return value in _WORDS[name]
    if name.endswith("scale"):
        return _is_number(value) and 0 < value < math.inf
    if name.endswith("zero_point") or name in ("quant_min", "quant_max", "low", "high"):
        return _is_whole(value) and abs(value) < _LARGEST_SIZE
    if name in _BETWEEN:
        return _all(_literals(value), *_BETWEEN[name])
    if name == "negative_slope":
        return _is_number(value) and math.isfinite(value)
    if name == "integer_dtype":
        return value in integer_checks.DTYPES
    if name.endswith("dtype"):
        return value in (_INTEGERS if name == "dtype" else _DTYPES)
    if name in ("kernel_size", "stride", "dilation"):
        return _all(value, 1, _LARGEST_WINDOW)
    if name in ("padding", "output_padding"):
        return _all(value, 0, _LARGEST_WINDOW)
    if name in ("groups", "hidden_size", "num_layers", "columns"):
        return _is_whole(value) and 1 <= value <= _LARGEST_SIZE
    if name == "dims":
        return value in (1, 2, 3)
    if name == "bits":
        return value in (4, 8)
    if name == "group":
        return _is_whole(value) and 0 <= value <= _LARGEST_WINDOW
    if name in ("size", "output_size", "first", "last"):
        return _is_size(name, value)
    if name == "eps":
        return _is_number(value) and 0 <= value < math.inf
    if name in ("scale_factor", "post_numbers", "divisor_override"):
        return _are_numbers(value, name)
    if name in ("dim", "axis"):
        return _all(value, -64, 64)
    if name == "operator":
        return isinstance(value, str)
    if name in ("between", "mask", "factor", "is_causal"):
        return _is_of_attention(name, value)
    return value is None or isinstance(value, bool)


def _are_numbers(value: Any, name: str) -> bool:
    found = value if isinstance(value, (list, tuple)) else [value]
    if name == "post_numbers":
        return all(_is_number(item) and not math.isnan(item) for item in found)
    return value is None or all(_is_number(v) and 2**-16 <= v <= 2**16 for v in found)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _all(value: Any, low: int, high: int) -> bool:
    found = value if isinstance(value, (list, tuple)) else [value]
    return len(found) <= 16 and all(
        item is None or (_is_whole(item) and low <= item <= high) for item in found
    )


def _literals(value: Any) -> list[Any]:
    found = value if isinstance(value, (list, tuple)) else [value]
    return [item for item in found if not isinstance(item, Node)]


def _is_size(name: str, value: Any) -> bool:
    """Sizes may be computed from those of the input: the operators check them."""
    return _all(_literals(value), -1 if name in ("first", "last") else 1, _LARGEST_SIZE)


_LONGEST = 64  # steps between two products


def _is_of_attention(name: str, value: Any) -> bool:
    """What happens to the scores of attention, step by step; what is added to them; their factor."""
    if name == "mask":
        return value is None or isinstance(value, Node)
    if name == "is_causal":
        return isinstance(value, (bool, Node))
    if name == "factor":
        return value is None or (_is_number(value) and math.isfinite(value))
    steps = value if isinstance(value, (list, tuple)) else [None]
    return len(steps) <= _LONGEST and all(map(_is_step, steps))


def _is_step(step: Any) -> bool:
    """One step of ``lower.kernels.attention``: a word, and what it takes."""
    if not isinstance(step, (list, tuple)) or len(step) != 2 or not isinstance(step[0], str):
        return False
    word, given = step
    if word == "reshape":
        return isinstance(given, (list, tuple)) and _is_size("first", given)
    if word == "masked_fill":
        two = isinstance(given, (list, tuple)) and len(given) == 2
        return two and isinstance(given[0], Node) and _is_number(given[1])
    if word in attention.QUERIES:
        return _is_number(given)
    return word in attention.STEPS and (isinstance(given, Node) or _is_number(given))
